"""Both ways end to end on tiny models: dtypes, settings, refusals, the card."""

import json
import shutil

import pytest
import torch
from conversion_models import random_smollm3
from safetensors.torch import load_file, save_file

from megatron_lengen.convert.reader import open_checkpoint
from megatron_lengen.convert.to_hf import checkpoint_to_hf, load_checkpoint_as_hf
from megatron_lengen.convert.to_megatron import hf_to_checkpoint
from megatron_lengen.convert.verify import verification_lengths
from megatron_lengen.errors import BadInput


def silent(line):
    pass


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_dtypes_are_kept_unless_asked(tmp_path):
    random_smollm3(tmp_path / "hf", dtype=torch.bfloat16)
    hf_to_checkpoint(tmp_path / "hf", tmp_path / "c", report=silent)
    key = "decoder.final_layernorm.weight"
    assert open_checkpoint(tmp_path / "c").read(key).dtype == torch.bfloat16
    for dtype, name in (("keep", "bfloat16"), ("bf16", "bfloat16"), ("fp32", "float32")):
        out = tmp_path / dtype
        checkpoint_to_hf(tmp_path / "c", out, dtype=dtype, report=silent)
        assert json.loads((out / "config.json").read_text())["dtype"] == name
        assert {str(t.dtype) for t in weights(out).values()} == {f"torch.{name}"}
        assert str(load_checkpoint_as_hf(tmp_path / "c", dtype=dtype).dtype) == f"torch.{name}"
    hf_to_checkpoint(tmp_path / "fp32", tmp_path / "c16", dtype="bf16", report=silent)
    assert open_checkpoint(tmp_path / "c16").read(key).dtype == torch.bfloat16


def test_half_precision_needs_a_decision(tmp_path):
    random_smollm3(tmp_path / "hf", dtype=torch.float16)
    with pytest.raises(BadInput, match=r"--dtype keep: .* is torch\.float16"):
        hf_to_checkpoint(tmp_path / "hf", tmp_path / "c", report=silent)
    hf_to_checkpoint(tmp_path / "hf", tmp_path / "c", dtype="bf16", report=silent)
    with pytest.raises(BadInput, match="--dtype: found half; allowed: keep, bf16, fp32"):
        checkpoint_to_hf(tmp_path / "c", tmp_path / "o", dtype="half")


def test_rounding_on_export_is_verified_against_rounded_weights(hf_folder, tmp_path):
    hf_to_checkpoint(hf_folder, tmp_path / "c", report=silent)
    measured = checkpoint_to_hf(tmp_path / "c", tmp_path / "o", dtype="bf16", report=silent)
    assert measured.worst < 1e-4 and min(measured.scales) > 1


def test_settings_are_verified_and_written(hf_folder, tmp_path):
    """A window put on the way must act in both models, hence at lengths above it."""
    random_smollm3(tmp_path / "hf", window=None)
    settings = {"sliding_window": 5, "rope_theta": 300}
    to = hf_to_checkpoint(tmp_path / "hf", tmp_path / "c", settings=settings, report=silent)
    assert to.lengths == (4, 5, 10)
    config = open_checkpoint(tmp_path / "c").config()
    assert (config.sliding_window, config.rotary_base) == (5, 300)
    again = {"sliding_window": 7, "max_position_embeddings": 512}
    back = checkpoint_to_hf(tmp_path / "c", tmp_path / "o", settings=again, report=silent)
    hf = json.loads((tmp_path / "o" / "config.json").read_text())
    assert back.lengths == (6, 7, 14)
    assert (hf["sliding_window"], hf["max_position_embeddings"], hf["rope_theta"]) == (7, 512, 300)
    with pytest.raises(BadInput, match="--set tie_word_embeddings"):
        checkpoint_to_hf(tmp_path / "c", tmp_path / "x", settings={"tie_word_embeddings": False})


def test_tied_weights_can_be_untied_on_import(hf_folder, tmp_path):
    settings = {"tie_word_embeddings": False}
    hf_to_checkpoint(hf_folder, tmp_path / "c", settings=settings, report=silent)
    checkpoint = open_checkpoint(tmp_path / "c")
    head = checkpoint.read("output_layer.weight")
    assert torch.equal(head, checkpoint.read("embedding.word_embeddings.weight"))
    model = load_checkpoint_as_hf(tmp_path / "c")
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()


def test_biases_go_round(tmp_path):
    random_smollm3(tmp_path / "hf", attention_bias=True, mlp_bias=True)
    hf_to_checkpoint(tmp_path / "hf", tmp_path / "c", report=silent)
    checkpoint_to_hf(tmp_path / "c", tmp_path / "o", report=silent)
    before, after = weights(tmp_path / "hf"), weights(tmp_path / "o")
    assert before.keys() == after.keys() and "model.layers.0.mlp.up_proj.bias" in after
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_head_dimension_of_its_own(tmp_path):
    random_smollm3(tmp_path / "hf", head_dim=16)
    hf_to_checkpoint(tmp_path / "hf", tmp_path / "c", report=silent)
    checkpoint_to_hf(tmp_path / "c", tmp_path / "o", report=silent)
    assert json.loads((tmp_path / "o" / "config.json").read_text())["head_dim"] == 16


def test_tensors_that_do_not_belong_are_refused(hf_folder, tmp_path):
    folder = shutil.copytree(hf_folder, tmp_path / "hf")
    tensors = weights(folder)

    def convert(changed, message):
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(BadInput, match=message):
            hf_to_checkpoint(folder, tmp_path / "c", report=silent)
        assert not (tmp_path / "c").exists()

    convert({**tensors, "model.extra": torch.zeros(1)}, "no place for model.extra")
    lost = {name: t for name, t in tensors.items() if name != "model.norm.weight"}
    convert(lost, r"no tensor model\.norm\.weight")
    q = "model.layers.1.self_attn.q_proj.weight"
    convert({**tensors, q: torch.zeros(31, 32)}, "found 31 rows; the configuration asks for 32")
    head = tensors["model.embed_tokens.weight"] + 1
    convert({**tensors, "lm_head.weight": head}, "tie_word_embeddings is true, but")
    same = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(same, folder / "model.safetensors")
    hf_to_checkpoint(folder, tmp_path / "c", report=silent)


def test_other_families_are_refused(hf_folder, tmp_path):
    folder = shutil.copytree(hf_folder, tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    with pytest.raises(BadInput, match="model_type: found bert; allowed: smollm3"):
        hf_to_checkpoint(folder, tmp_path / "c")


def test_existing_targets_and_damaged_sources_are_refused(checkpoint_folder, tmp_path):
    out = tmp_path / "out"
    checkpoint_to_hf(checkpoint_folder, out, verify=False, report=silent)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(BadInput, match="exists already"):
        checkpoint_to_hf(checkpoint_folder, out, verify=False)
    damaged = shutil.copytree(checkpoint_folder, tmp_path / "damaged")
    shard = damaged / "release" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(BadInput, match=r"__0_0\.distcp: cut short"):
        checkpoint_to_hf(damaged, out, verify=False, force=True)
    assert (out / "model.safetensors").read_bytes() == before
    checkpoint_to_hf(checkpoint_folder, out, verify=False, force=True, report=silent)


def test_the_card_tells_how_it_was_trained(checkpoint_folder, tmp_path):
    copy = shutil.copytree(checkpoint_folder, tmp_path / "c")
    note = copy / "release" / "lengen.json"
    info = json.loads(note.read_text())
    command = ["/home/someone/pretrain_gpt.py", "--lr", "2e-5", "--save", "/home/someone/secret"]
    info |= {"consumed_samples": 100, "command": [*command, "--load=/home/someone/secret"]}
    info["arguments"] = {
        "training": {"lr": 2e-5, "seq_length": 64, "data_path": ["/home/someone/secret"]},
        "model": {"dropout_variant": "vpad", "dropout_rate": 0.3, "dropout_layers": None},
    }
    note.write_text(json.dumps(info))
    checkpoint_to_hf(copy, tmp_path / "my-model", verify=False, report=silent)
    card = (tmp_path / "my-model" / "README.md").read_text()
    assert "# my-model" in card and "| dropout_variant | vpad |" in card
    assert "| lr | 2e-05 |" in card and "dropout_layers" not in card and "secret" not in card
    assert "| dropout_rate | 0.3 |" in card and "| tokens | 6400 |" in card
    assert "python pretrain_gpt.py --lr 2e-5 --save ... --load=..." in card
    assert "3 layers see the last 8 tokens, 1 see everything" in card


@pytest.mark.parametrize(
    ("window", "lengths"),
    [(None, [64]), (1, [1, 2]), (8, [7, 8, 16]), (64, [63, 64, 128]), (4096, [64, 4096, 4160])],
)
def test_lengths_lie_below_at_and_above_the_window(window, lengths, checkpoint_folder):
    info = open_checkpoint(checkpoint_folder).info["model"]
    skips = info["window_attn_skip_freq"] if window else None
    settings = {"sliding_window": window, "window_attn_skip_freq": skips}
    from megatron_lengen.config import config_from_architecture

    assert verification_lengths(config_from_architecture({**info, **settings})) == lengths
