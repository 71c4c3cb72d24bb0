"""Logits of our models and of their Hugging Face forms, whoever's code those need.

`reference_logits`, in float64 and written from the definitions, is the third party.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "convert"))

from conversion_models import random_checkpoint, reference_logits

from megatron_lengen.convert import verify
from megatron_lengen.convert.families import parse_settings
from megatron_lengen.convert.family import acting_settings
from megatron_lengen.convert.lengen import Lengen
from megatron_lengen.convert.reader import open_checkpoint
from megatron_lengen.convert.to_hf import checkpoint_to_hf, load_checkpoint_as_hf
from megatron_lengen.convert.to_megatron import hf_to_checkpoint
from megatron_lengen.convert.verify import VerificationError
from megatron_lengen.errors import BadInput

SMOLLM3 = {"no_rope_freq": 4, "sliding_window": 8, "window_attn_skip_freq": 4}
LEARNED = {"query_scaling": "learned"}
NAPE = {"position_embedding_type": "nape", "untie_embeddings_and_output_weights": True}
ENTMAX = {"attention_function": "entmax"}
YARN = {
    "position_embedding_type": "yarn",
    "rotary_scaling_factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
}
CASES = {
    "scaled-smollm3": ("lengen", {**SMOLLM3, **LEARNED}),
    "scaled-nope-layers": (
        "lengen",
        {
            **SMOLLM3,
            **LEARNED,
            "query_scaling_scope": "nope",
            "query_scaling_coef_activation": "softplus_shifted",
            "query_scaling_coef_shift": 1.0,
            "query_scaling_coef_bound": 0.7,
            "query_scaling_pow_bound": 1.5,
            "query_scaling_log_base": 2.718281828,
            "query_scaling_proj_bias": False,
            "query_scaling_weight_scale": 0.5,
            "query_scaling_identity_init": False,
        },
    ),
    "nape-llama": ("lengen", {**NAPE, "num_query_groups": 4}),
    "nape-entmax-scaled": (
        "lengen",
        {
            **NAPE,
            **ENTMAX,
            **LEARNED,
            "query_scaling_scope": "nope",
            "nape_alibi_heads": 3,
            "alibi_slopes": "alibi",
        },
    ),
    "nape-log": ("lengen", {**NAPE, "query_scaling": "log"}),
    "entmax-smollm3": ("lengen", {**SMOLLM3, **ENTMAX, "entmax_alpha": 1.3}),
    "ssmax-yarn": ("lengen", {**SMOLLM3, **YARN, "query_scaling": "ssmax"}),
    "yarn-smollm3": ("smollm3", {**SMOLLM3, **YARN}),
    "yarn-llama": ("llama", YARN),
    "llama-untied": ("llama", {"untie_embeddings_and_output_weights": True, "num_query_groups": 4}),
}


def silent(line):
    pass


@pytest.fixture(autouse=True)
def modules_of_models(tmp_path, monkeypatch):
    """Code of models that transformers copies before it runs it goes away with the test."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.mark.parametrize(("family", "settings"), CASES.values(), ids=CASES.keys())
def test_logits_agree_and_the_round_trip_is_bitwise(family, settings, tmp_path):
    from transformers import AutoModelForCausalLM

    random_checkpoint(tmp_path / "c", **settings)
    name = family if family == "llama" else None  # a SmolLM3 can be it, too, and comes first
    measured = checkpoint_to_hf(tmp_path / "c", tmp_path / "o", family=name, report=silent)
    assert max(measured.differences) < 1e-4 and min(measured.scales) > 1
    own_code = family == "lengen"
    model, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "o", trust_remote_code=own_code, output_loading_info=True
    )
    assert not any(loading.values()) and model.config.model_type == family
    opened = open_checkpoint(tmp_path / "c")
    for length in (1, 9, 70):
        tokens = torch.randint(0, 101, (length,), generator=torch.Generator().manual_seed(length))
        expected = reference_logits(opened.config(), opened.read, tokens)
        with torch.inference_mode():
            assert (model(tokens[None]).logits[0] - expected).abs().max() < 1e-4

    hf_to_checkpoint(tmp_path / "o", tmp_path / "again", report=silent)
    again = open_checkpoint(tmp_path / "again")
    assert set(again.model_keys) == set(opened.model_keys)
    assert all(torch.equal(again.read(key), opened.read(key)) for key in opened.model_keys)
    assert acting_settings(again.config()) == acting_settings(opened.config())
    # Without a word of the user it goes back to what it came from.
    checkpoint_to_hf(tmp_path / "again", tmp_path / "back", verify=False, report=silent)
    assert (tmp_path / "back" / "config.json").read_text() == (
        tmp_path / "o" / "config.json"
    ).read_text()


@pytest.mark.parametrize("kind", ["yarn", "llama3", "linear"])
def test_scaling_put_on_the_way_acts_in_both_directions(kind, tmp_path):
    random_checkpoint(tmp_path / "c", **SMOLLM3)
    settings = parse_settings([f'rope_parameters={{"rope_type": "{kind}", "factor": 4}}'])
    tokens = torch.arange(60) % 101
    checkpoint_to_hf(tmp_path / "c", tmp_path / "o", settings=settings, report=silent)
    hf_to_checkpoint(tmp_path / "o", tmp_path / "again", report=silent)
    opened = open_checkpoint(tmp_path / "again")
    original = opened.config().original_max_position_embeddings
    assert original == (None if kind == "linear" else 128)
    with torch.inference_mode():
        found = load_checkpoint_as_hf(tmp_path / "again")(tokens[None]).logits[0]
    assert (found - reference_logits(opened.config(), opened.read, tokens)).abs().max() < 1e-4
    plain = open_checkpoint(tmp_path / "c")
    assert (found - reference_logits(plain.config(), plain.read, tokens)).abs().max() > 1e-2


# ---- what verification must catch ----------------------------------------------------------------

EVERYTHING = {**NAPE, **ENTMAX, **LEARNED, "query_scaling_log_base": 10.0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """NAPE, entmax and learned scaling; tests must not change it."""
    folder = tmp_path_factory.mktemp("everything") / "c"
    random_checkpoint(folder, **EVERYTHING)
    return folder


FAULTS = {
    "slope": {"attention_alibi_slopes": [1.0, 0.45, 0.0, 0.0]},
    "scaled slope": {"attention_alibi_slopes": [1.01, 0.505, 0.0, 0.0]},
    "base": {"attention_scaling_log_base": 9.0},
    "bound": {"attention_scaling_coef_bound": 0.9},
    "alpha": {"attention_entmax_alpha": 1.49},
    "softmax": {"attention_function": "softmax"},
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_wrong_setting_is_caught_and_nothing_is_published(
    fault, checkpoint, tmp_path, monkeypatch
):
    """Before anything is written, by the modules of the model, and by its logits alone."""
    honest = Lengen.hf_config
    monkeypatch.setattr(Lengen, "hf_config", lambda *args: {**honest(*args), **fault})
    with pytest.raises(BadInput, match=r"lengen cannot represent|attention_alibi_slopes"):
        checkpoint_to_hf(checkpoint, tmp_path / "o", report=silent)
    monkeypatch.setattr(Lengen, "objection", lambda self, config: None)
    with pytest.raises(VerificationError, match=r"layer 0 has (slopes|scaling|alpha) "):
        checkpoint_to_hf(checkpoint, tmp_path / "o", report=silent)
    monkeypatch.setattr(verify, "_check_pattern", lambda *args: None)
    with pytest.raises(VerificationError, match="largest difference of logits"):
        checkpoint_to_hf(checkpoint, tmp_path / "o", report=silent)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("- slopes * distance", "- 1.01 * slopes * distance"),
        ("torch.log(p + 2)", "torch.log(p + 1.9)"),
        ("e = 1 / (alpha - 1)", "e = 1 / (alpha - 0.99)"),
        ("(query.float() * factor)", "query"),
    ],
)
def test_a_fault_of_the_code_that_travels_is_caught(
    right, wrong, checkpoint, tmp_path, monkeypatch
):
    text = Lengen.code.read_text()
    assert right in text
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / Lengen.code.name).write_text(text.replace(right, wrong))
    monkeypatch.setattr(Lengen, "code", tmp_path / "code" / Lengen.code.name)
    with pytest.raises(VerificationError, match="largest difference of logits"):
        checkpoint_to_hf(checkpoint, tmp_path / "o", report=silent)
    assert not (tmp_path / "o").exists()


def test_in_memory_it_is_the_same_model(checkpoint):
    tokens = torch.arange(40) % 101
    opened = open_checkpoint(checkpoint)
    with torch.inference_mode():
        found = load_checkpoint_as_hf(checkpoint)(tokens[None]).logits[0]
    assert (found - reference_logits(opened.config(), opened.read, tokens)).abs().max() < 1e-4


# ---- how others load it --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder_with_tokenizer(tmp_path_factory):
    """A model of everything, exported with a tokenizer of bytes."""
    from megatron_lengen.data.tokenizer import build_tokenizer

    folder = tmp_path_factory.mktemp("with_tokenizer")
    tokenizer = build_tokenizer("byte")
    random_checkpoint(folder / "c", **EVERYTHING, vocab_size=tokenizer.vocab_size)
    tokenizer.save(folder / "c" / "release" / "tokenizer")
    checkpoint_to_hf(folder / "c", folder / "o", verify=False, report=silent)
    return folder / "o"


def test_pipelines_generate_text(folder_with_tokenizer):
    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

    with pytest.raises(ValueError, match="trust_remote_code=True"):
        AutoModelForCausalLM.from_pretrained(folder_with_tokenizer, trust_remote_code=False)
    generate = pipeline("text-generation", str(folder_with_tokenizer), trust_remote_code=True)
    asked = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    (answer,) = generate("Once upon", **asked)
    tokenizer = AutoTokenizer.from_pretrained(folder_with_tokenizer, trust_remote_code=False)
    ids = tokenizer("Once upon", return_tensors="pt").input_ids
    grown = ids
    with torch.inference_mode():
        for _ in range(8):
            logits = generate.model(grown, use_cache=False).logits
            grown = torch.cat((grown, logits[:, -1:].argmax(-1)), 1)
    assert answer["generated_text"] == tokenizer.decode(
        grown[0, ids.shape[1] :], skip_special_tokens=True
    )


def test_nobody_is_asked_whether_to_run_code(folder_with_tokenizer, tmp_path, monkeypatch):
    """Transformers asks on the terminal unless it is told; conversion and evaluation tell it."""
    from megatron_lengen.evaluation.model import load_model, load_tokenizer
    from megatron_lengen.evaluation.sources import find_model

    asked = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "n")
    hf_to_checkpoint(folder_with_tokenizer, tmp_path / "c", verify=False, report=silent)
    checkpoint_to_hf(tmp_path / "c", tmp_path / "o", verify=False, report=silent)
    source = find_model(str(tmp_path / "o"))
    text = load_tokenizer(source).encode("Once upon")
    assert load_model(source, "cpu").greedy(torch.tensor([text]), 2).shape == (1, 2)
    assert asked == []


def test_lm_evaluation_harness_loads_it(folder_with_tokenizer):
    """Likelihoods of its own batching (padded, reordered) equal one forward each."""
    reason = "lm-eval is not installed: pip install lm-eval"
    models = pytest.importorskip("lm_eval.models.huggingface", reason=reason)
    from lm_eval.api.instance import Instance

    model = models.HFLM(
        pretrained=str(folder_with_tokenizer), trust_remote_code=True, device="cpu", batch_size=2
    )
    pairs = [("The sky is", " blue"), ("A longer context than the first, so", " pad"), ("x", "y")]
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    for (context, continuation), (found, _) in zip(
        pairs, model.loglikelihood(requests), strict=True
    ):
        ids = torch.tensor([model.tok_encode(context + continuation)])
        with torch.inference_mode():
            scores = model.model(ids).logits.log_softmax(-1)
        first = len(model.tok_encode(context))
        own = scores[0, first - 1 : -1].gather(1, ids[0, first:, None]).sum()
        assert abs(found - float(own)) < 1e-3


# ---- scaled checkpoints of others ----------------------------------------------------------------


@pytest.fixture
def foreign(tmp_path):
    """A scaled SmolLM3 under other names, with code of its own and fewer entries than ours."""
    random_checkpoint(tmp_path / "c", **SMOLLM3, **LEARNED)
    checkpoint_to_hf(tmp_path / "c", tmp_path / "theirs", verify=False, report=silent)
    folder = tmp_path / "theirs"
    text = Lengen.code.read_text().replace("Lengen", "Scaled").replace('"lengen"', '"smollm3"')
    for name in ("coef", "pow"):
        text = text.replace(f'"{name}"', f'"{name}_proj"')
    (folder / Lengen.code.name).rename(folder / "modeling_scaled.py")
    (folder / "modeling_scaled.py").write_text(text)
    hf = json.loads((folder / "config.json").read_text())
    for entry in ("type", "scope", "log_base", "coef_shift"):
        del hf[f"attention_scaling_{entry}"]
    hf["auto_map"] = {
        "AutoConfig": "modeling_scaled.ScaledModelConfig",
        "AutoModelForCausalLM": "modeling_scaled.ScaledForCausalLM",
    }
    hf |= {"model_type": "smollm3", "architectures": ["ScaledForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(hf))
    tensors = load_file(folder / "model.safetensors")
    for name in ("coef", "pow"):
        tensors = {k.replace(f".{name}_", f".{name}_proj_"): t for k, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_scaled_checkpoints_of_others_are_read_with_what_the_user_says(foreign, tmp_path):
    out = tmp_path / "again"

    def read(**arguments):
        return hf_to_checkpoint(foreign, out, report=silent, **arguments)

    def refused(message, **arguments):
        with pytest.raises(BadInput, match=message):
            read(**arguments)
        assert not out.exists()

    refused("config.json: does not say attention_scaling_scope; allowed: --set")
    arguments = {"settings": {"attention_scaling_scope": "all"}}
    refused("no tensor .*coef_bias.* it has .*coef_proj_bias.*, see --rename", **arguments)
    refused("--rename: found beta; no tensor has it", **arguments, renames={"beta": "coef"})
    arguments["renames"] = {".coef_proj_": ".coef_", ".pow_proj_": ".pow_"}
    refused("allowed: --trust-remote-code to run it, or --no-verify", **arguments)
    measured = read(**arguments, trust_remote_code=True)
    assert max(measured.differences) < 1e-4
    before, after = open_checkpoint(tmp_path / "c"), open_checkpoint(out)
    assert all(torch.equal(before.read(key), after.read(key)) for key in before.model_keys)
    assert acting_settings(before.config()) == acting_settings(after.config())

    # Where their code means something else by an entry, the comparison says so.
    code = foreign / "modeling_scaled.py"
    code.write_text(code.read_text().replace("torch.log(p + 2)", "torch.log(p + 3)"))
    with pytest.raises(VerificationError, match="largest difference of logits"):
        read(**arguments, trust_remote_code=True, force=True)
