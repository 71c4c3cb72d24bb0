"""Transformer Engine in plain PyTorch, for a process that has none; `install` before Megatron-Core.

Names, arguments, defaults, parameters, attributes and the assertions on shapes are those of
Transformer Engine 2.20.2 (read in its wheel), so that Megatron-Core's own wrappers run over it. Of
its arguments those are left out that Megatron-Core does not pass. One tensor-parallel rank only.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VERSION = "2.20.2"


class Calls:
    """What was called since `clear`."""

    norms = 0
    fused_norms = 0
    attention: list[dict[str, Any]]
    products_in_fp8: list[str]
    recipes: list[Any]

    @classmethod
    def clear(cls) -> None:
        """Forget."""
        cls.norms = cls.fused_norms = 0
        cls.attention, cls.products_in_fp8, cls.recipes = [], [], []


Calls.clear()


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As its kernel: fp32 up to the one rounding at the end."""
    wide = x.float()
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (unit * weight.float()).to(x.dtype)


class _Module(nn.Module):
    """State beside the parameters: an empty tensor of bytes where nothing was quantized."""

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        assert state is None or state.numel() == 0


class RMSNorm(_Module):
    def __init__(
        self,
        normalized_shape: Iterable[int] | int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device: Any = "cuda",
    ) -> None:
        assert (normalized_shape is None) != (hidden_size is None)
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.sequence_parallel = sequence_parallel
        size = normalized_shape if hidden_size is None else hidden_size
        self.weight = nn.Parameter(torch.ones(size, dtype=params_dtype, device=device))
        if sequence_parallel is not None:
            self.weight.sequence_parallel = sequence_parallel

    def forward(self, input: Tensor) -> Tensor:
        Calls.norms += 1
        return _rms_norm(input, self.weight, self.eps)


class _Product(_Module):
    def _make(self, inputs: int, outputs: int, bias: bool, mode: str | None, **kind: Any) -> None:
        self.in_features, self.out_features, self.use_bias = inputs, outputs, bias
        self.parallel_mode, self.tp_size = mode, 1
        self.weight = nn.Parameter(torch.empty(outputs, inputs, **kind))
        self.weight.tensor_model_parallel = True
        self.weight.partition_dim = 1 if mode == "row" else 0
        self.weight.partition_stride = 1
        if bias:
            self.bias = nn.Parameter(torch.zeros(outputs, **kind))

    def _multiply(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if FP8GlobalStateManager.enabled:
            for tensor in (x, self.weight):  # assert_dim_for_fp8_exec
                if math.prod(tensor.shape[:-1]) % 8 or tensor.shape[-1] % 16:
                    raise ValueError(f"FP8 execution requires other dims than {tensor.shape}")
            Calls.products_in_fp8.append(type(self).__name__)
        bias = self.bias if self.use_bias else None
        if self.return_bias:
            return F.linear(x, self.weight), bias
        return F.linear(x, self.weight, bias)


class Linear(_Product):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        assert tp_size == 1 and not sequence_parallel
        self.return_bias, self.save_original_input = return_bias, save_original_input
        self._make(
            in_features, out_features, bias, parallel_mode, dtype=params_dtype, device=device
        )

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        return self._multiply(inp)


class LayerNormLinear(_Product):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        init_method: Any = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
        name: str | None = None,
    ) -> None:
        super().__init__()
        assert normalization == "RMSNorm" and not zero_centered_gamma and tp_size == 1
        self.return_bias, self.eps = return_bias, eps
        kind = {"dtype": params_dtype, "device": device}
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features, **kind))
        self._make(in_features, out_features, bias, parallel_mode, **kind)

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        Calls.fused_norms += 1
        return self._multiply(_rms_norm(inp, self.layer_norm_weight, self.eps))


class DotProductAttention(_Module):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        assert attention_dropout == 0 and attention_type == "self" and attn_mask_type == "causal"
        self.groups, self.window_size = num_gqa_groups or num_attention_heads, window_size
        self.qkv_format, self.softmax_scale = qkv_format, softmax_scale
        self.settings = {"window_size": window_size, "layer_number": layer_number}

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        assert attention_mask is None and core_attention_bias_type == "no_bias"
        layout = qkv_format or self.qkv_format
        window = self.window_size if window_size is None else window_size
        asked = {"format": layout, "mask": attn_mask_type, "window": window}
        qkv = (query_layer, key_layer, value_layer)
        assert all(x.shape[-2] == self.groups for x in qkv[1:])
        if layout == "sbhd":
            assert all(x.dim() == 4 for x in qkv)
            Calls.attention.append(asked)
            return self._rows(*(x.transpose(0, 1) for x in qkv), window).transpose(0, 1)
        assert layout == "thd" and "padding" in (attn_mask_type or "")
        assert all(x.dim() == 3 and x.is_contiguous() for x in qkv)
        assert cu_seqlens_q is not None and cu_seqlens_kv is not None
        assert cu_seqlens_q.shape == cu_seqlens_kv.shape and cu_seqlens_q.dim() == 1
        assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32
        # Without it Transformer Engine asks the device in every layer.
        assert isinstance(max_seqlen_q, int) and isinstance(max_seqlen_kv, int)
        assert cu_seqlens_q_padded is None and cu_seqlens_kv_padded is None
        ends = cu_seqlens_q.tolist()
        Calls.attention.append({**asked, "ends": ends, "longest": (max_seqlen_q, max_seqlen_kv)})
        lengths = cu_seqlens_q.diff().tolist()
        assert ends[-1] == query_layer.shape[0] and max(lengths) <= max_seqlen_q
        documents = zip(*(x.split(lengths) for x in qkv), strict=True)
        return torch.cat([self._rows(*(x[None] for x in d), window)[0] for d in documents])

    def _rows(self, q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int] | None) -> Tensor:
        """[b, s, heads, d] -> [b, s, heads * d]; bounds of windows are inclusive, -1 is none."""
        dtype = q.dtype
        q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scale = q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        back = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        seen = back >= 0
        if window is not None and window[0] >= 0:
            seen &= back <= window[0]
        scores = (scale * q @ k.transpose(-1, -2)).masked_fill(~seen, -math.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2).to(dtype)


class FP8GlobalStateManager:
    enabled = False

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.enabled

    @classmethod
    def is_fp8_available(cls) -> tuple[bool, str]:
        return True, ""

    @classmethod
    def is_mxfp8_available(cls) -> tuple[bool, str]:
        return False, "Device compute capability 10.0 or higher required for MXFP8 execution."

    @classmethod
    def is_fp8_block_scaling_available(cls) -> tuple[bool, str]:
        return True, ""


@contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    before = FP8GlobalStateManager.enabled
    Calls.recipes.append(fp8_recipe)
    FP8GlobalStateManager.enabled = enabled
    try:
        yield
    finally:
        FP8GlobalStateManager.enabled = before


class Format(Enum):
    E4M3, E5M2, HYBRID = range(3)


class Recipe:
    """pydantic's dataclasses drop arguments that they do not know, as Megatron-Core counts on."""

    def __init__(self, fp8_format: Format, **others: Any) -> None:
        self.fp8_format, self.others = fp8_format, others


def install() -> None:
    """Be `transformer_engine` for this process."""
    kinds = ("Delayed", "Float8Current", "Float8Block", "MXFP8Block", "NVFP4Block")
    recipes = {name: type(name, (Recipe,), {}) for name in (f"{kind}Scaling" for kind in kinds)}
    nothing = {name: type(name, (_Module,), {}) for name in ("LayerNorm", "GroupedLinear")}
    _module("transformer_engine", __version__=VERSION)
    _module("transformer_engine.common")
    _module("transformer_engine.common.recipe", Format=Format, **recipes)
    _module(
        "transformer_engine.pytorch",
        RMSNorm=RMSNorm,
        Linear=Linear,
        LayerNormLinear=LayerNormLinear,
        DotProductAttention=DotProductAttention,
        fp8_autocast=fp8_autocast,
        Fp8Padding=object,
        Fp8Unpadding=object,
        **nothing,
    )
    _module(
        "transformer_engine.pytorch.fp8",
        FP8GlobalStateManager=FP8GlobalStateManager,
        fp8_autocast=fp8_autocast,
    )
    _module(
        "transformer_engine.pytorch.distributed",
        CudaRNGStatesTracker=type("CudaRNGStatesTracker", (), {}),
        activation_recompute_forward=None,
        checkpoint=None,
    )
    # Only named in annotations of what is not used here.
    _module("transformer_engine.pytorch.ops", Sequential=nn.Module, FusibleOperation=nn.Module)
    _module(
        "transformer_engine.pytorch.router",
        fused_compute_score_for_moe_aux_loss=None,
        fused_moe_aux_loss=None,
        fused_topk_with_score_function=None,
    )
    _module(
        "transformer_engine.pytorch.tensor",
        QuantizedTensor=type("QuantizedTensor", (), {}),
    )


def _module(name: str, **names: Any) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    vars(module).update(names)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
