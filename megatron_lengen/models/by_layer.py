"""Models whose weights are loaded layer by layer while they compute, and dropped behind it.

For models that memory does not hold. Nothing of a model is rewritten: its modules are built without
weights, and hooks around each layer fill and empty it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def without_weights() -> Iterator[None]:
    """Modules built in this block have parameters on the meta device, but buffers as usual."""
    register = nn.Module.register_parameter

    def register_empty(module: Any, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            marks = dict(vars(parameter))
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
            vars(parameter).update(marks)
        register(module, name, parameter)

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def load_by_layer(
    model: nn.Module, layers: Iterable[nn.Module], value: Callable[[str, nn.Parameter], Tensor]
) -> None:
    """Let a model that was built without weights load them while it computes.

    Args:
        model: as `without_weights` leaves it.
        layers: modules that are filled as a whole; every other one that has parameters of its own
            (the embedding, the last norm, the head) is filled alone.
        value: the weights for a parameter's name, from the parameter on the meta device.
    """
    layers = list(layers)
    inside = {id(module) for layer in layers for module in layer.modules()}
    others = [module for module in model.modules() if module._parameters]
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def real(parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(value(names[id(parameter)], parameter), requires_grad=False)

    for block in layers + [module for module in others if id(module) not in inside]:
        _fill_around(block, real)


def _fill_around(block: nn.Module, real: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Hooks that fill a block before it computes and empty it after."""
    empty = [
        (module, name, parameter)
        for module in block.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]

    def here(given: Any) -> Any:
        # The head of a tied model is called with the embedding's weights.
        return real(given) if isinstance(given, nn.Parameter) and given.is_meta else given

    def fill(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        for module, name, parameter in empty:
            module._parameters[name] = real(parameter)
        return tuple(map(here, args)), {key: here(given) for key, given in kwargs.items()}

    def clear(*_: Any) -> None:
        for module, name, parameter in empty:
            module._parameters[name] = parameter

    block.register_forward_pre_hook(fill, with_kwargs=True)
    block.register_forward_hook(clear)
