"""Bytes that layers keep for backward, against what autograd really saves."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_config
from torch import Tensor, nn

from megatron_lengen.config import LengenConfig
from megatron_lengen.errors import BadInput
from megatron_lengen.layers.coordinates import set_documents, set_samples
from megatron_lengen.models.build import build_chunks
from megatron_lengen.sizing.activations import Step, check_computable, chunk_memory
from megatron_lengen.sizing.memory import chunks_of_stage

pytestmark = pytest.mark.usefixtures("process_groups")

ROWS, LENGTH, VOCAB = 2, 192, 256
SIZES = {
    "hidden_size": 64,
    "ffn_hidden_size": 112,
    "seq_length": LENGTH,
    "vocab_size": VOCAB,
    "sliding_window": None,
    "window_attn_skip_freq": None,
    "dropout_variant": "vpad",
    "dropout_rate": 0.3,
}
SETTINGS = {
    "grouped heads": {},
    "no grouped heads": {"num_query_groups": 4},
    "windows": {"sliding_window": 64, "window_attn_skip_freq": 4},
    "windows, no grouped heads": {"sliding_window": 64, "num_query_groups": 4},
    "no rotary positions": {"no_rope_freq": None, "position_embedding_type": "none"},
    "half rotary": {"rotary_percent": 0.5},
    "alibi": {"position_embedding_type": "nape", "no_rope_freq": None},
    "documents": {"document_boundaries": "mask"},
    "no gate": {"gated_linear_unit": False, "activation_func": nn.functional.gelu},
    "loss from logits": {"cross_entropy_fusion_impl": "none"},
    "loss from logits, bf16": {
        "cross_entropy_fusion_impl": "none",
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
    },
    "no dropout": {"dropout_variant": "none", "dropout_rate": 0.0},
    "dropout before the residual": {"dropout_variant": "pre_norm"},
    "bf16": {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16},
    "core attention again": {"recompute_granularity": "selective"},
    "core attention again, no grouped heads": {
        "recompute_granularity": "selective",
        "num_query_groups": 4,
    },
    "mlp again": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "layers again": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "pairs of layers again": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
    },
    "one layer again": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 1,
    },
}


def gradients_found(loss: Tensor) -> list[Tensor]:
    """What the loss's node keeps for its inputs, [] where it works from logits."""
    node = loss.grad_fn
    while node is not None and not hasattr(node, "found"):
        node = node.next_functions[0][0] if node.next_functions else None
    return [] if node is None else list(node.found)


def saved_bytes(model: nn.Module, config: LengenConfig) -> int:
    """Storage that autograd holds after a forward with loss, parameters left out.

    The loss holds the gradients that its forward found beside what autograd saves for it.
    """
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = tensor
        return tensor

    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    positions = torch.arange(LENGTH).expand(ROWS, LENGTH)
    set_samples(range(ROWS))
    set_documents(positions // 50 if config.document_boundaries == "mask" else None)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model.train()(
            tokens, positions, None, labels=tokens, loss_mask=torch.ones(ROWS, LENGTH)
        )
    set_documents(None)
    for gradient in gradients_found(loss):
        keep(gradient)
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


@pytest.mark.parametrize("name", SETTINGS)
def test_kept_bytes_are_those_that_autograd_saves(name):
    config = tiny_config(**{**SIZES, **SETTINGS[name]})
    (model,) = build_chunks(config)
    (chunk,) = chunks_of_stage(config, 0)
    counted = chunk_memory(config, chunk, Step(1, ROWS, 1, device="cpu")).kept
    # Token ids, targets and angles that all layers share are not counted.
    assert counted == pytest.approx(saved_bytes(model, config), rel=0.03)


@pytest.mark.parametrize(
    "changes, flag",
    [
        ({"dropout_apply_to": "q,d"}, "--dropout-apply-to"),
        ({"query_scaling": "log"}, "--query-scaling"),
    ],
)
def test_what_is_not_counted_is_refused(changes, flag):
    with pytest.raises(BadInput, match=flag):
        check_computable(tiny_config(**{**SIZES, **changes}))
