"""Loading for evaluation: our attention against eager, losses against full logits, LM head use."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from evaluation_models import VOCAB, TensorSizes, llama, smollm3

from megatron_lengen.errors import BadInput
from megatron_lengen.evaluation.model import load_model, load_tokenizer, prepare_model
from megatron_lengen.evaluation.sources import find_model


def random_ids(rows: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, VOCAB, (rows, length), generator=generator)


@pytest.mark.parametrize("build", [llama, smollm3, lambda: smollm3(window=1)])
@pytest.mark.parametrize("length", [5, 8, 9, 150])
def test_prefill_equals_eager(build, length):
    model = build()
    model.set_attn_implementation("eager")
    ids = random_ids(2, length)
    with torch.no_grad():
        expected = model(ids).logits
    ours = prepare_model(model)
    assert model.config._attn_implementation == "lengen"
    torch.testing.assert_close(ours.head(ours.hidden(ids)), expected, rtol=1e-4, atol=1e-4)


def test_window_has_an_effect():
    ids = random_ids(1, 40)
    narrow, wide = (prepare_model(smollm3(window=w)).hidden(ids) for w in (8, 9))
    torch.testing.assert_close(narrow[:, :8], wide[:, :8], rtol=1e-4, atol=1e-4)
    assert (narrow[:, 8:] - wide[:, 8:]).abs().max() > 1e-3


@pytest.mark.parametrize("build", [llama, smollm3])
def test_cached_decoding_equals_full_forwards_with_eager(build):
    model = build()
    model.set_attn_implementation("eager")
    ids = random_ids(2, 30)
    grown = ids
    with torch.no_grad():
        for _ in range(20):
            grown = torch.cat((grown, model(grown).logits[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(prepare_model(model).greedy(ids, 20), grown[:, 30:])


def test_greedy_ignores_end_tokens_and_sampling_of_the_release():
    model = llama()
    with torch.no_grad():
        first = model(random_ids(1, 10)).logits[0, -1].argmax().item()
    model.generation_config.eos_token_id = first
    model.generation_config.do_sample = True
    model.generation_config.temperature = 50.0
    output = prepare_model(model).greedy(random_ids(1, 10), 6)
    assert output.shape == (1, 6) and output[0, 0] == first


def test_prefill_applies_the_head_to_one_position():
    ours = prepare_model(smollm3())
    seen = []
    ours.head.register_forward_hook(lambda module, args, out: seen.append(tuple(args[0].shape)))
    ours.greedy(random_ids(2, 300), 3)
    assert [shape[:2] for shape in seen] == [(2, 1)] * 3


def test_losses_equal_full_logits_and_the_head_sees_slices():
    ours = prepare_model(smollm3())
    ids = random_ids(2, 301)
    with torch.no_grad():
        logits = ours.model(ids).logits.double()
    expected = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    seen = []
    ours.head.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    losses = ours.token_losses(ids, chunk=64)
    assert seen == [64, 64, 64, 64, 44]
    assert losses.shape == (2, 300) and losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.token_losses(ids), losses)


def test_default_slices_bound_the_logits():
    ours = prepare_model(llama(vocab=60_000, layers=1))
    seen = []
    ours.head.register_forward_hook(lambda module, args, out: seen.append(out.numel()))
    ours.token_losses(random_ids(1, 1500))
    assert len(seen) == 3 and max(seen) <= 1 << 25


def test_memory_of_attention_is_linear():
    """No tensor of the forward has S x S elements; the largest are S x (2 W) and S x hidden."""
    ours = prepare_model(smollm3())
    length = 2048
    with TensorSizes() as made:
        ours.hidden(random_ids(1, length))
    assert 0 < max(made.sizes) < length * length // 4


def test_forced_tokens_are_those_of_the_full_forward():
    ours = prepare_model(llama())
    ids = random_ids(2, 25)
    with torch.no_grad():
        expected = ours.model(ids).logits.argmax(-1)[:, 25 - 4 - 1 : -1]
    assert torch.equal(ours.forced_tokens(ids, 4), expected)


def test_padding_is_refused():
    ours = prepare_model(llama())
    mask = torch.tensor([[0, 1, 1, 1]])
    with pytest.raises(ValueError, match="padded"):
        ours.model(random_ids(1, 4), attention_mask=mask)


def test_scaled_logits_are_refused():
    model = llama()
    forward = model.forward

    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits / 2
        return output

    model.forward = scaled
    with pytest.raises(BadInput, match="after the LM head"):
        prepare_model(model)


def test_folder_round_trip_and_missing_weights(tmp_path):
    from safetensors.torch import load_file, save_file

    model = llama()
    model.save_pretrained(tmp_path)
    ids = random_ids(1, 12)
    loaded = load_model(find_model(str(tmp_path)), "cpu")
    assert loaded.describe()["dtype"] == "float32"
    with torch.no_grad():
        torch.testing.assert_close(loaded.head(loaded.hidden(ids)), model(ids).logits)
    half = load_model(find_model(str(tmp_path)), "cpu", "bf16")
    assert half.hidden(ids).dtype == torch.bfloat16

    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadInput, match=r"lacks 1 weights.*layers\.1\.mlp\.up_proj"):
        load_model(find_model(str(tmp_path)), "cpu")


def test_megatron_checkpoint_is_the_model_it_came_from(tmp_path):
    from megatron_lengen.convert.to_megatron import hf_to_checkpoint

    model = smollm3()
    model.save_pretrained(tmp_path / "hf")
    hf_to_checkpoint(tmp_path / "hf", tmp_path / "run", verify=False, report=lambda line: None)
    source = find_model(str(tmp_path / "run"))
    assert (source.kind, source.iteration) == ("megatron", "release")
    loaded = load_model(source, "cpu")
    ids = random_ids(1, 40)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(ids).logits
    logits = loaded.head(loaded.hidden(ids))[..., :VOCAB]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(BadInput, match="no tokenizer"):
        load_tokenizer(source)
    assert load_tokenizer(source, "byte").encode("a") == [97]


@pytest.mark.parametrize("device", ["cuda:99", "nonsense"])
def test_devices_that_are_not_there(tmp_path, device):
    llama().save_pretrained(tmp_path)
    with pytest.raises(BadInput, match="--device"):
        load_model(find_model(str(tmp_path)), device)


def test_find_model(tmp_path):
    def place(root, iterations, latest):
        for name in iterations:
            (root / name).mkdir(parents=True)
            stored = {"arguments": {"seq_length": 256}, "name": name}
            (root / name / "lengen.json").write_text(json.dumps(stored))
        (root / "latest_checkpointed_iteration.txt").write_text(latest)

    place(tmp_path / "run", ["iter_0000010", "iter_0000020"], "20\n")
    place(tmp_path / "start", ["release"], "release")
    run = str(tmp_path / "run")
    assert find_model(run).iteration == 20
    assert find_model(run, iteration=10).folder.name == "iter_0000010"
    inside = find_model(run + "/iter_0000010")
    assert (inside.name, inside.iteration) == (run, 10)
    assert find_model(str(tmp_path / "start")).iteration == "release"
    assert find_model("owner/name", revision="abc").kind == "hub"
    assert find_model(run).identity() != find_model(run, iteration=10).identity()
    for arguments in [(run, 30), (run + "/nothing", None), ("a/b/c", None), ("owner/name", 3)]:
        with pytest.raises(BadInput):
            find_model(*arguments)
