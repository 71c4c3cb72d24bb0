"""Tokenizers and token ids through both conversions."""

import json

import pytest
from conversion_models import random_smollm3

from megatron_lengen.convert.to_hf import checkpoint_to_hf
from megatron_lengen.convert.to_megatron import hf_to_checkpoint
from megatron_lengen.convert.tokens import within_vocabulary
from megatron_lengen.data.tokenizer import SentencePieceTokenizer, build_tokenizer
from megatron_lengen.errors import BadInput

TEXTS = ["the cat sat", "  two  spaces", "digits 1234", "naïve café", "line\nbreak", "<s> </s>"]


def silent(line):
    pass


@pytest.fixture
def spm_model(tmp_path):
    from megatron_lengen.data.sentencepiece_tools import train_sentencepiece

    text = "the cat sat on the mat and the dog ran over the hill with a naïve café line\n" * 20
    words = [f"word{i} {text[i % 40 :][:60]}" for i in range(200)]
    train_sentencepiece(words, 320, tmp_path / "t.model")
    return tmp_path / "t.model"


def export(folder, saved, tmp_path, **model):
    """A checkpoint of a random model with this tokenizer, exported."""
    random_smollm3(tmp_path / "hf", **model)
    hf_to_checkpoint(tmp_path / "hf", tmp_path / "c", verify=False, report=silent)
    note = tmp_path / "c" / "release" / "lengen.json"
    info = json.loads(note.read_text())
    del info["source"]
    note.write_text(json.dumps(info))
    if saved is not None:
        saved.save(tmp_path / "c" / "release" / "tokenizer")
    checkpoint_to_hf(tmp_path / "c", folder, verify=False, report=silent)
    return json.loads((folder / "config.json").read_text())


def test_sentencepiece_loads_in_autotokenizer_with_equal_ids(spm_model, tmp_path):
    import sentencepiece
    from transformers import AutoTokenizer

    out = tmp_path / "out"
    hf = export(out, SentencePieceTokenizer(spm_model), tmp_path, vocab_size=320)
    model = sentencepiece.SentencePieceProcessor(model_file=str(spm_model))
    theirs = AutoTokenizer.from_pretrained(out)
    for text in TEXTS[:-1]:
        assert theirs(text, add_special_tokens=False)["input_ids"] == model.encode(text)
    assert (out / "tokenizer.model").read_bytes() == spm_model.read_bytes()
    assert (hf["bos_token_id"], hf["eos_token_id"]) == (model.bos_id(), model.eos_id())
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation["eos_token_id"] == model.eos_id()


def test_huggingface_files_go_round_byte_for_byte(spm_model, tmp_path):
    source = tmp_path / "source"
    random_smollm3(source, vocab_size=320, eos_token_id=5, pad_token_id=7)
    SentencePieceTokenizer(spm_model).save_for_huggingface(source)
    (source / "chat_template.jinja").write_text("{{ messages }}\n")
    hf_to_checkpoint(source, tmp_path / "c", verify=False, report=silent)
    assert build_tokenizer(tmp_path / "c" / "release" / "tokenizer").kind == "huggingface"
    checkpoint_to_hf(tmp_path / "c", tmp_path / "out", verify=False, report=silent)
    names = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    # The imported model's own ids win over the tokenizer's.
    hf = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (hf["eos_token_id"], hf["pad_token_id"], hf["bos_token_id"]) == (5, 7, None)


@pytest.mark.parametrize("saved", [None, build_tokenizer("null", vocab_size=101)])
def test_models_without_tokenizer_files_export(saved, tmp_path):
    hf = export(tmp_path / "out", saved, tmp_path)
    assert hf["bos_token_id"] is None and hf["pad_token_id"] is None
    assert hf["eos_token_id"] == (None if saved is None else 100)
    assert not list((tmp_path / "out").glob("tokenizer*"))


def test_ids_outside_of_the_vocabulary_are_not_written(tmp_path):
    random_smollm3(tmp_path / "hf")
    lines = []
    settings = {"pad_token_id": 101, "bos_token_id": 100}
    hf_to_checkpoint(tmp_path / "hf", tmp_path / "c", verify=False, report=silent)
    checkpoint_to_hf(
        tmp_path / "c", tmp_path / "o", settings=settings, verify=False, report=lines.append
    )
    hf = json.loads((tmp_path / "o" / "config.json").read_text())
    assert (hf["bos_token_id"], hf["eos_token_id"], hf["pad_token_id"]) == (100, 1, None)
    assert lines[0] == "pad_token_id 101 is outside of the vocabulary: written as None"
    kept = within_vocabulary({"eos_token_id": [1, 500], "bos_token_id": -1}, 101)
    assert kept == {"eos_token_id": [1], "bos_token_id": None, "pad_token_id": None}


def test_settings_of_generation_go_round_byte_for_byte(tmp_path):
    """Temperatures and lists of end tokens too; only ids that nothing can emit are left out."""
    random_smollm3(tmp_path / "hf")
    file = tmp_path / "hf" / "generation_config.json"
    settings = {
        "do_sample": True,
        "eos_token_id": [1, 7],
        "temperature": 0.6,
        "top_p": 0.95,
        "transformers_version": "4.0.0",
    }
    file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    options = {"verify": False, "report": silent, "force": True}
    hf_to_checkpoint(tmp_path / "hf", tmp_path / "c", **options)

    def exported(**settings):
        checkpoint_to_hf(tmp_path / "c", tmp_path / "o", settings=settings, **options)
        return tmp_path / "o" / "generation_config.json"

    assert exported().read_bytes() == file.read_bytes()
    assert json.loads(exported(eos_token_id=3).read_text()) == {**settings, "eos_token_id": 3}
    file.write_text(json.dumps({"eos_token_id": [7, 101], "top_k": 5}))
    hf_to_checkpoint(tmp_path / "hf", tmp_path / "c", **options)
    assert json.loads(exported().read_text()) == {"eos_token_id": [7], "top_k": 5}
    file.unlink()
    hf_to_checkpoint(tmp_path / "hf", tmp_path / "c", **options)
    assert json.loads(exported().read_text()) == {"eos_token_id": 1}
    file.write_text("{")
    with pytest.raises(BadInput, match=r"generation_config\.json: damaged"):
        hf_to_checkpoint(tmp_path / "hf", tmp_path / "c", **options)
