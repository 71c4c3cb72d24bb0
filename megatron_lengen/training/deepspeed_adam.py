"""AdamW for DeepSpeed to step: PyTorch's, or DeepSpeed's own for state that lives on the CPU."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from megatron_lengen.errors import BadInput
from megatron_lengen.training.arguments import Settings
from megatron_lengen.training.deepspeed_host import import_deepspeed
from megatron_lengen.training.optimizer import weight_decay_groups


def build_adam(settings: Settings, chunk: nn.Module, mpu: Any) -> torch.optim.Optimizer:
    """AdamW with the run's constants and weight-decay rule.

    Args:
        mpu: the process groups, by DeepSpeed's names.

    Raises:
        BadInput: where DeepSpeed's Adam for the CPU cannot be built.
    """
    config, flags = settings.deepspeed, settings.optimizer
    assert config is not None and flags.lr is not None
    zero, groups = config["zero_optimization"], weight_decay_groups(settings, chunk)
    constants: dict[str, Any] = {
        "lr": flags.lr,
        "betas": (flags.adam_beta1, flags.adam_beta2),
        "eps": flags.adam_eps,
        "weight_decay": flags.weight_decay,
    }
    if zero["stage"] == 0:
        return CheckedAdamW(groups, flags.clip_grad, mpu, **constants)
    if zero["offload_optimizer"]["device"] == "cpu" and config["zero_force_ds_cpu_optimizer"]:
        try:
            return import_deepspeed().ops.adam.DeepSpeedCPUAdam(groups, **constants)
        except RuntimeError as error:
            reason = str(error.__cause__ or error).strip().splitlines()[0]
            raise BadInput(f"--deepspeed-config: offload_optimizer: {error} ({reason})") from error
    return torch.optim.AdamW(groups, fused=True, **constants)


class CheckedAdamW(torch.optim.AdamW):
    """AdamW that clips, and leaves out an update whose gradients are not finite.

    DeepSpeed's ZeRO optimizers do both. Without one (stage 0) DeepSpeed steps what it was given,
    and reads these two attributes afterwards.
    """

    def __init__(self, params: Any, clip: float, mpu: Any, **constants: Any) -> None:
        super().__init__(params, fused=True, **constants)
        self._clip, self._mpu = clip, mpu
        self.overflow = False
        self._global_grad_norm = math.nan

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Clip to the global norm and update, unless that norm is not finite."""
        norm = import_deepspeed().runtime.utils.clip_grad_norm_(
            [parameter for group in self.param_groups for parameter in group["params"]],
            max_norm=self._clip or math.inf,
            mpu=self._mpu,
        )
        self._global_grad_norm = float(norm)
        self.overflow = not math.isfinite(self._global_grad_norm)
        if not self.overflow:
            super().step()
