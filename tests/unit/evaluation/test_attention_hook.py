"""The package's attention inside transformers' models: nothing that they ask for is left out."""

from __future__ import annotations

import pytest
import torch
from evaluation_models import VOCAB, TensorSizes, lengen, llama, smollm3, windowed_entmax

from megatron_lengen.evaluation.model import load_model, prepare_model
from megatron_lengen.evaluation.sources import find_model

OWN = {
    "nape": lengen,
    "nape-entmax": lambda: lengen(attention_function="entmax", attention_scaling_enabled=True),
    "windows-entmax": windowed_entmax,
}
EVERY = {**OWN, "llama": llama, "smollm3": smollm3}


def random_ids(rows, length):
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(4))


def eager_logits(model, ids, **inputs):
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(ids, use_cache=False, **inputs).logits


@pytest.mark.parametrize("build", OWN.values(), ids=OWN)
def test_own_models_equal_their_written_out_attention(build):
    model = build()
    for length in (5, 9, 290):
        ids = random_ids(2, length)
        expected = eager_logits(model, ids)
        ours = prepare_model(model)
        assert model.config._attn_implementation == "lengen"
        torch.testing.assert_close(ours.head(ours.hidden(ids)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("build", OWN.values(), ids=OWN)
def test_cached_decoding_of_own_models(build):
    model, ids = build(), random_ids(2, 20)
    grown = ids
    for _ in range(12):
        grown = torch.cat((grown, eager_logits(model, grown)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(prepare_model(model).greedy(ids, 12), grown[:, 20:])


@pytest.mark.parametrize("build", EVERY.values(), ids=EVERY)
def test_documents_packed_by_positions_do_not_see_each_other(build):
    """Positions restart at 0, 11 and 12 in the first row, at 0 and 7 in the second."""
    model, ids = build(), random_ids(2, 30)
    starts = [[0, 11, 12], [0, 7]]
    positions = torch.arange(30).repeat(2, 1)
    for row, begins in enumerate(starts):
        for begin in begins:
            positions[row, begin:] = torch.arange(30 - begin)
    prepare_model(model)
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=False).logits
        for row, begins in enumerate(starts):
            for begin, end in zip(begins, [*begins[1:], 30], strict=True):
                alone = model(ids[row : row + 1, begin:end]).logits[0]
                torch.testing.assert_close(packed[row, begin:end], alone, rtol=1e-4, atol=1e-4)


def test_what_it_cannot_do_is_refused():
    model, ids = llama(), random_ids(1, 6)
    prepare_model(model)
    with pytest.raises(ValueError, match="caches of a fixed size"):
        model.generate(ids, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(ValueError, match="a prepared attention mask"):
        model(ids, attention_mask=torch.zeros(1, 1, 6, 6))


def test_memory_stays_linear_at_16_thousand_tokens():
    """No tensor is a twelfth of S x S for one head; S x S for both would be 2 GiB."""
    length = 16384
    model = lengen(
        hidden_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        no_rope_layers=[0],
        attention_alibi_slopes=[1.0, 0.0],
        attention_scaling_enabled=True,
        attention_function="entmax",
    )
    ours, ids = prepare_model(model), random_ids(1, length)
    with TensorSizes() as made:
        ours.hidden(ids)
    assert 0 < max(made.sizes) < length * length // 12


def test_an_exported_folder_loads_without_running_its_code(tmp_path):
    """Evaluation has this package's code for these models; a folder's own could be anybody's."""
    model = lengen()
    model.config.auto_map = {
        "AutoConfig": "modeling_lengen.LengenModelConfig",
        "AutoModelForCausalLM": "modeling_lengen.LengenForCausalLM",
    }
    model.save_pretrained(tmp_path)
    (tmp_path / "modeling_lengen.py").write_text("raise RuntimeError('this code was run')\n")
    loaded, ids = load_model(find_model(str(tmp_path)), "cpu"), random_ids(1, 12)
    torch.testing.assert_close(
        loaded.head(loaded.hidden(ids)), eager_logits(model, ids), rtol=1e-4, atol=1e-4
    )
