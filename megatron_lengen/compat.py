"""What depends on the versions and packages that happen to be installed.

The only place that branches on Megatron-Core's version or on optional packages. A package that is
there but cannot work (a Transformer Engine without its CUDA libraries, PyPI's unrelated `apex`)
would break Megatron-Core while it is imported, so it is hidden before that.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from packaging.version import Version

logger = logging.getLogger(__name__)


def hide_unusable_packages() -> None:
    """Make broken optional packages look absent; called before Megatron-Core is imported."""
    for message in (
        "Apex is not installed",
        "Transformer Engine and Apex are not installed",
        "mxfp8 without using reuse_grad_buf",  # recommends flags that are not served here
    ):
        warnings.filterwarnings("ignore", message=message)
    for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):  # Megatron-Core's own calls
        warnings.filterwarnings("ignore", message=f"`torch.distributed.{name}` is deprecated")
    # 0.16 names feed-forwards that are not its own, and builds them as they should be.
    layers = logging.getLogger("megatron.core.transformer.transformer_layer")
    layers.addFilter(lambda record: not record.getMessage().startswith("Unknown MLP type"))
    if not _imports("transformer_engine"):
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    # NVIDIA's apex brings the compiled module amp_C; the package of that name on PyPI does not.
    if importlib.util.find_spec("apex") and not importlib.util.find_spec("amp_C"):
        logger.warning("ignoring the package 'apex': it is not NVIDIA's")
        sys.modules["apex"] = None  # type: ignore[assignment]


def compile_when_called() -> None:
    """Let Megatron-Core's fused functions be compiled at their first call, not when they are
    defined: the compiler takes a second to import, and most processes call none of them."""
    sys.meta_path.insert(0, _LazyFuser())


class _LazyFuser(importlib.abc.MetaPathFinder):
    """Finds `megatron.core.jit` once, and changes what it decorates with."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "megatron.core.jit":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_change(module: ModuleType) -> None:
                execute(module)
                module.jit_fuser = compiled_when_called  # type: ignore[attr-defined]

            spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def compiled_when_called(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that PyTorch compiles at its first call."""

    @functools.cache
    def compiled() -> Callable[..., Any]:
        import torch

        return torch.compile(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call


@functools.cache
def _imports(name: str) -> bool:
    if not is_installed(name.partition(".")[0]):
        return False
    try:
        importlib.import_module(name)
    except Exception as error:  # a half-installed package raises whatever it likes
        logger.warning("ignoring the package '%s': it does not import (%s)", name, error)
        return False
    return True


def optional_module(name: str) -> ModuleType | None:
    """A module of an optional package, or None where there is none that imports (said once)."""
    return sys.modules[name] if _imports(name) else None


def have_transformer_engine() -> bool:
    """Whether Transformer Engine can be used in this process."""
    return _imports("transformer_engine")


def is_installed(name: str) -> bool:
    """Whether a package can be found; it is not imported."""
    return sys.modules.get(name, name) is not None and importlib.util.find_spec(name) is not None


def megatrons_async_strategy() -> tuple[str, ...]:
    """How Megatron-Core's asynchronous writer is asked for, as arguments of `async_save`.

    From 0.17 on there is NVIDIA's resiliency package besides, which is the default.
    """
    installed = Version(package_version("megatron-core") or "0")
    return ("mcore",) if installed >= Version("0.17") else ()


def package_version(name: str) -> str | None:
    """Installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Versions worth writing into checkpoints and results."""
    names = "megatron-lengen megatron-core torch transformer-engine transformers deepspeed"
    return {name: package_version(name) for name in names.split()}
