"""Models of megatron_lengen that no class of transformers holds; travels with their checkpoints.

SmolLM3's decoder with three additions to its attention, each off unless config.json says otherwise:

    factor[i, h]   = 1 + coef_h(x_i) * log(p_i + 2) ^ pow_h(x_i), or ln(p_i + 1), or s_h ln(p_i + 1)
    score[i, j, h] = factor[i, h] * <q_i, k_j> / sqrt(d) - slope_h * (i - j)
    weight[i]      = softmax or alpha-entmax of the visible scores

x_i is the attention's input and p_i the token's position; positions restart after padding and
where `position_ids` do. Llama's blocks without rotary positions are SmolLM3's with `no_rope_layers`
all 0. Needs torch and transformers, nothing else.
"""

import inspect
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import SmolLM3Config, SmolLM3ForCausalLM, SmolLM3Model
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.smollm3.modeling_smollm3 import (
    SmolLM3Attention,
    apply_rotary_pos_emb,
    eager_attention_forward,
    repeat_kv,
)

# Queries at a time where scores are written out and nobody asks for the weights.
QUERY_ROWS = 256


class LengenModelConfig(SmolLM3Config):
    """SmolLM3's settings, and those of the additions."""

    model_type = "lengen"
    base_model_tp_plan = None  # the additions know heads by their number among all

    attention_function: str = "softmax"
    attention_entmax_alpha: float = 1.5
    attention_alibi_slopes: list[float] | None = None
    attention_scaling_enabled: bool = False
    attention_scaling_type: str = "learned"
    attention_scaling_scope: str = "all"
    attention_scaling_coef_bound: float = 1.0
    attention_scaling_pow_bound: float = 2.0
    attention_scaling_coef_activation: str = "sigmoid"
    attention_scaling_coef_shift: float = 8.0
    attention_scaling_log_base: float = 2.0
    attention_scaling_proj_bias: bool = True
    attention_scaling_weight_scale_alpha: float = 1.0
    attention_scaling_identity_init: bool = True


class QueryScaling(nn.Module):
    """Factors of one layer's queries; everything in fp32.

    Args:
        heads: which heads are scaled.
    """

    def __init__(self, config: LengenModelConfig, heads: list[bool]) -> None:
        super().__init__()
        self.heads = tuple(heads)
        self.kind = config.attention_scaling_type
        self.coef_bound = config.attention_scaling_coef_bound
        self.pow_bound = config.attention_scaling_pow_bound
        self.coef_activation = config.attention_scaling_coef_activation
        self.coef_shift = config.attention_scaling_coef_shift
        self.log_base = config.attention_scaling_log_base
        self.weight_scale = config.attention_scaling_weight_scale_alpha
        if self.kind == "learned":
            for name in ("coef", "pow"):
                weight = nn.Parameter(torch.zeros(len(heads), config.hidden_size))
                bias = nn.Parameter(torch.zeros(len(heads)))
                self.register_parameter(f"{name}_weight", weight)
                has_bias = config.attention_scaling_proj_bias
                self.register_parameter(f"{name}_bias", bias if has_bias else None)
        elif self.kind == "ssmax":
            self.ssmax_scale = nn.Parameter(torch.ones(len(heads)))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Factors [b, s, heads] of inputs [b, s, h] at positions [b or 1, s]."""
        p = positions[..., None].float()
        if self.kind == "learned":
            factor = self._learned(x, p)
        else:
            factor = torch.log(p + 1).expand(-1, -1, len(self.heads))
            if self.kind == "ssmax":
                factor = factor * self.ssmax_scale.float()
        if all(self.heads):
            return factor
        return torch.where(torch.tensor(self.heads, device=x.device), factor, 1.0)

    def _learned(self, x: Tensor, p: Tensor) -> Tensor:
        z = self._project(x, "coef")
        if self.coef_activation == "sigmoid":
            coef = self.coef_bound * torch.sigmoid(z)
        else:
            coef = self.coef_bound * F.softplus(z - self.coef_shift)
        power = self.pow_bound * torch.tanh(self._project(x, "pow"))
        return 1 + coef * (torch.log(p + 2) / math.log(self.log_base)) ** power

    def _project(self, x: Tensor, name: str) -> Tensor:
        weight, bias = getattr(self, f"{name}_weight"), getattr(self, f"{name}_bias")
        z = self.weight_scale * F.linear(x.float(), weight.float())
        return z if bias is None else z + bias.float()


class LengenAttention(SmolLM3Attention):
    """SmolLM3's attention with scaled queries, ALiBi's bias and entmax."""

    def __init__(self, config: LengenModelConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        heads = config.num_attention_heads
        self.alibi_slopes = config.attention_alibi_slopes
        entmax = config.attention_function == "entmax"
        self.entmax_alpha = config.attention_entmax_alpha if entmax else 1.0
        self.plain = self.alibi_slopes is None and self.entmax_alpha == 1
        slopes = self.alibi_slopes or [0.0] * heads
        scaled = [True] * heads
        if config.attention_scaling_scope == "nope":
            scaled = [slope == 0 and not self.use_rope for slope in slopes]
        self.attention_scaling = None
        if config.attention_scaling_enabled and any(scaled):
            self.attention_scaling = QueryScaling(config, scaled)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache=None,
        past_key_values=None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """As SmolLM3's; `past_key_values` is what earlier transformers call the cache."""
        cache = past_key_values if cache is None else cache
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            project(hidden_states).view(shape)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.attention_scaling is not None:
            factor = self.attention_scaling(hidden_states, position_ids)[..., None]
            query = (query.float() * factor).to(query.dtype)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if self.use_rope:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        past = 0
        if cache is not None:
            past = int(cache.get_seq_length(self.layer_idx))
            # In older versions caches of a fixed size have to be told where they are.
            place = {name: kwargs[name] for name in ("cache_position",) if name in kwargs}
            key, value = cache.update(key, value, self.layer_idx, place)
        if not self.plain:
            kwargs |= {"alibi_slopes": self.alibi_slopes, "entmax_alpha": self.entmax_alpha}
            kwargs["past"] = past
        output, weights = self._interface()(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            position_ids=position_ids,
            **kwargs,
        )
        return self.o_proj(output.reshape(*shape[:2], -1)), weights

    def _interface(self):
        """What computes attention under the chosen `attn_implementation`.

        Raises:
            ValueError: where it would leave out ALiBi's bias or take softmax for entmax.
        """
        name = self.config._attn_implementation
        if name in ("eager", "sdpa") and not self.plain:
            return written_out_attention
        if name == "eager":
            return eager_attention_forward
        interface = ALL_ATTENTION_FUNCTIONS[name]
        serves = {"alibi_slopes", "entmax_alpha"} <= set(inspect.signature(interface).parameters)
        if not (self.plain or serves):
            raise ValueError(
                f"attn_implementation: found {name}; allowed for a model with "
                f"{'ALiBi' if self.entmax_alpha == 1 else 'entmax'}: sdpa, eager"
            )
        return interface


class LengenModel(SmolLM3Model):
    """SmolLM3's decoder with `LengenAttention`."""

    config_class = LengenModelConfig
    _can_compile_fullgraph = False  # entmax looks at its scores to know when it is done

    def __init__(self, config: LengenModelConfig) -> None:
        super().__init__(config)
        for number, layer in enumerate(self.layers):
            layer.self_attn = LengenAttention(config, number)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        """As SmolLM3's, except that without `position_ids` padding does not count as tokens."""
        if position_ids is None and isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
            inputs = kwargs["inputs_embeds"] if input_ids is None else input_ids
            counted = attention_mask.long().cumsum(-1) - 1
            position_ids = counted.clamp(min=0)[:, -inputs.shape[1] :]
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **kwargs,
        )


class LengenForCausalLM(SmolLM3ForCausalLM):
    """SmolLM3's language model over `LengenModel`."""

    config_class = LengenModelConfig
    _can_compile_fullgraph = False

    def __init__(self, config: LengenModelConfig) -> None:
        super().__init__(config)
        self.model = LengenModel(config)
        self.post_init()


def written_out_attention(
    module: LengenAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    past: int,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """Attention from its scores, in fp32; under `sdpa` some queries at a time.

    Args:
        query: [b, heads, sq, d].
        key, value: [b, groups, sk, d], as the cache gives them.
        attention_mask: [b or 1, 1, sq, sk], True where a key is visible, or added to the scores;
            None: the earlier keys are.
        past: tokens before the first query.

    Returns:
        [b, sq, heads, d], and under `eager` the weights [b, heads, sq, sk].
    """
    key, value = (repeat_kv(x, module.num_key_value_groups).float() for x in (key, value))
    length, device = query.shape[2], query.device
    # Windowed caches give the last keys; others all of them, and static ones room for more.
    first_key = max(past + length - key.shape[2], 0)
    j = first_key + torch.arange(key.shape[2], device=device)
    slopes = torch.tensor(module.alibi_slopes or [0.0], device=device)[:, None, None]
    eager = module.config._attn_implementation == "eager"
    outputs = []
    for start in range(0, length, length if eager else QUERY_ROWS):
        rows = slice(start, start + (length if eager else QUERY_ROWS))
        distance = past + torch.arange(length, device=device)[rows, None] - j
        scores = torch.matmul(query[:, :, rows].float(), key.transpose(2, 3)) * scaling
        scores = scores - slopes * distance
        visible = distance >= 0 if attention_mask is None else attention_mask[..., rows, :]
        if visible.dtype == torch.bool:
            # Not -inf: a row of padding sees nothing, and must not become NaN.
            scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        else:
            scores = scores + visible.float()
        alpha = module.entmax_alpha
        weights = scores.softmax(-1) if alpha == 1 else entmax(scores, alpha)
        weights = F.dropout(weights, dropout, module.training)
        outputs.append(torch.matmul(weights, value))
    output = torch.cat(outputs, 2).to(query.dtype).transpose(1, 2).contiguous()
    return output, weights if eager else None


def entmax(scores: Tensor, alpha: float) -> Tensor:
    """Alpha-entmax over the last dimension, 1 < alpha <= 2 (Peters et al. 2019).

    p = [x - tau]_+ ^ e with x = (alpha - 1) scores, e = 1 / (alpha - 1), and tau such that p sums
    to 1: Newton's steps on the e-norm of [x - tau]_+, which is convex in tau. A last step that
    autograd sees gives tau's derivative.
    """
    e = 1 / (alpha - 1)
    x = (alpha - 1) * (scores - scores.amax(-1, keepdim=True).detach())
    tau = torch.full_like(x[..., :1], -1.0)
    with torch.no_grad():
        for _ in range(50):
            step = _newton_step(x, tau, e)
            tau = tau + step
            if not (step > 4 * torch.finfo(x.dtype).eps).any():
                break
    weights = (x - tau - _newton_step(x, tau, e)).clamp(min=0) ** e
    return weights / weights.sum(-1, keepdim=True)


def _newton_step(x: Tensor, tau: Tensor, e: float) -> Tensor:
    u = (x - tau).clamp(min=0)
    norm = (u**e).sum(-1, keepdim=True) ** (1 / e)
    slope = torch.where(u > 0, u ** (e - 1), 0).sum(-1, keepdim=True).detach()
    return (norm - 1) * norm ** (e - 1) / slope
