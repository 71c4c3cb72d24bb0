"""Every kind of tokenizer: ids, end of document, saving, and the way to Hugging Face and back."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from made_tokenizers import make_hf_folder, source_texts

from megatron_lengen.data.fast_tokenizers import PROBES
from megatron_lengen.data.sentencepiece_tools import read_model, train_sentencepiece
from megatron_lengen.data.tokenizer import build_tokenizer, load_saved
from megatron_lengen.errors import BadInput


@pytest.fixture(scope="module")
def spm_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spm") / "tokenizer.model"
    assert train_sentencepiece(source_texts(), 800, path) == 800
    return path


def train_variant(path: Path, **options: object) -> Path:
    """A SentencePiece model with the trainer's own defaults, where `options` says nothing."""
    import sentencepiece

    lines = [line for text in source_texts() for line in text.splitlines() if line.strip()]
    with path.open("wb") as stream:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=stream,
            vocab_size=700,
            minloglevel=2,
            num_threads=1,
            **options,
        )
    return path


def random_texts(count: int) -> list[str]:
    """Strings rich in runs: spaces, newlines, dashes, digits, accents, several scripts, NUL."""
    rng = random.Random(7)
    alphabet = " \n\t=-_ax.,()'\"19\u00e9\u6f22\U0001f389\x00"
    return [
        "".join(rng.choice(alphabet) * rng.choice([1, 1, 2, 5, 17]) for _ in range(25))
        for _ in range(count)
    ]


def test_sentencepiece_loses_nothing(spm_path: Path) -> None:
    tokenizer = build_tokenizer(spm_path)
    assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.eod) == ("sentencepiece", 800, 2)
    for text in [*PROBES, *source_texts(), *random_texts(200)]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    digits = tokenizer.encode("98765")
    assert [tokenizer.decode([i]) for i in digits] == list("98765")


@pytest.mark.parametrize("model_type", ["llama", "smollm3", "mamba2"])
def test_sentencepiece_opens_in_auto_tokenizer_with_equal_ids(
    spm_path: Path, tmp_path: Path, model_type: str
) -> None:
    from transformers import AutoTokenizer

    ours = build_tokenizer(spm_path)
    assert ours.save_for_huggingface(tmp_path)
    # AutoTokenizer must not prefer the class of the model that lies beside the tokenizer.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == ours.vocab_size
    assert theirs.eos_token_id == ours.eod and theirs.bos_token_id == ours.bos
    for text in [*PROBES, *source_texts(), *random_texts(300)]:
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == text


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "unigram"},
        {"model_type": "bpe"},
        {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"},
        {"model_type": "unigram", "byte_fallback": True, "add_dummy_prefix": False},
    ],
    ids=["unigram", "bpe", "llama", "unigram-bytes"],
)
def test_other_sentencepiece_settings_convert(options: dict, tmp_path: Path) -> None:
    """Models of others: spaces squeezed, a space put before the text, characters normalised."""
    from transformers import AutoTokenizer

    ours = build_tokenizer(train_variant(tmp_path / "x.model", **options))
    ours.save_for_huggingface(tmp_path / "hf")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    words = ["Hello  world ", " x = [1, 2]\n", "  indent\n    more\n", "na\u00efve \ufb01ne \u2014"]
    for text in [*words, *PROBES]:
        assert theirs(text)["input_ids"] == ours.encode(text)
    lines = [line + "\n" for text in source_texts() for line in text.splitlines()]
    equal = sum(theirs(line)["input_ids"] == ours.encode(line) for line in lines)
    # Unigram segmentations of equal score are told apart by rounding in either library.
    assert equal == len(lines) if options["model_type"] == "bpe" else equal > 0.97 * len(lines)
    ids = ours.encode("return self.name")
    assert theirs.decode(ids) == ours.decode(ids)


def test_unconvertible_sentencepiece_is_refused(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(train_variant(tmp_path / "x.model", model_type="char"))
    with pytest.raises(BadInput, match="cannot be written for Hugging Face"):
        tokenizer.save_for_huggingface(tmp_path / "hf")


def test_model_file_is_read_as_protobuf_reads_it(spm_path: Path) -> None:
    pb2 = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    proto = pb2.ModelProto.FromString(spm_path.read_bytes())
    model = read_model(spm_path.read_bytes())
    assert model.pieces == [(p.piece, p.score, p.type) for p in proto.pieces]
    assert model.model_type == proto.trainer_spec.model_type
    assert model.byte_fallback == proto.trainer_spec.byte_fallback
    assert model.charsmap == proto.normalizer_spec.precompiled_charsmap
    assert model.add_dummy_prefix == proto.normalizer_spec.add_dummy_prefix
    assert model.remove_extra_whitespaces == proto.normalizer_spec.remove_extra_whitespaces


@pytest.mark.parametrize("kind", ["spm", "hf", "byte", "null"])
def test_saved_tokenizer_comes_back(kind: str, spm_path: Path, tmp_path: Path) -> None:
    if kind == "spm":
        source = build_tokenizer(spm_path)
    elif kind == "hf":
        source = build_tokenizer(make_hf_folder(tmp_path / "source"))
    else:
        source = build_tokenizer(kind, vocab_size=100)
    source.save(tmp_path / "saved")
    back = load_saved(tmp_path / "saved")
    assert type(back) is type(source)
    assert (back.vocab_size, back.eod, back.bos) == (source.vocab_size, source.eod, source.bos)
    text = "1 22 33" if kind == "null" else "def f(x):  # caf\u00e9"
    assert back.encode(text) == source.encode(text)
    assert back.decode(source.encode(text)) == text
    assert build_tokenizer(tmp_path / "saved").encode(text) == source.encode(text)
    note = json.loads((tmp_path / "saved" / "lengen_tokenizer.json").read_text())
    assert note == {"type": source.kind, "vocab_size": source.vocab_size, "eod": source.eod}


def test_saved_note_is_checked_against_the_files(spm_path: Path, tmp_path: Path) -> None:
    build_tokenizer(spm_path).save(tmp_path)
    note = tmp_path / "lengen_tokenizer.json"
    note.write_text(json.dumps({"type": "sentencepiece", "vocab_size": 999, "eod": 2}))
    with pytest.raises(BadInput, match="999"):
        load_saved(tmp_path)


def test_huggingface_files_are_copied_byte_for_byte(tmp_path: Path) -> None:
    source = make_hf_folder(tmp_path / "source")
    # A layout that save_pretrained would not write, and files that are none of the tokenizer's.
    config = source / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()), indent=7, sort_keys=True))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "config.json").write_text('{"model_type": "llama"}')
    (source / "model.safetensors").write_bytes(b"weights")
    tokenizer = build_tokenizer(source)
    tokenizer.save(tmp_path / "saved")
    load_saved(tmp_path / "saved").save_for_huggingface(tmp_path / "again")
    names = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert {path.name for path in (tmp_path / "again").iterdir()} == names
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (source / name).read_bytes()


def test_hub_id_is_taken_from_the_cache(tmp_path: Path) -> None:
    """A hub id whose files lie in the cache: the same bytes are saved, with no network."""
    source = make_hf_folder(tmp_path / "source")
    repo = tmp_path / "cache" / "models--someone--tiny"
    snapshot = repo / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(snapshot.name)
    (source / "config.json").write_text('{"model_type": "llama"}')
    for path in source.iterdir():
        (snapshot / path.name).write_bytes(path.read_bytes())
    code = (
        "import sys\n"
        "from megatron_lengen.data.tokenizer import build_tokenizer\n"
        "tokenizer = build_tokenizer('someone/tiny')\n"
        "tokenizer.save(sys.argv[1])\n"
        "try:\n"
        "    build_tokenizer('someone/absent')\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    environment = {
        **os.environ,
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "saved")],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "someone/absent" in done.stdout
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "saved" / name).read_bytes() == (source / name).read_bytes()


def test_no_start_or_end_token_is_added(tmp_path: Path) -> None:
    """Also where the tokenizer's own post-processor adds one."""
    from transformers import AutoTokenizer

    folder = make_hf_folder(tmp_path, bos=True)
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = build_tokenizer(folder)
    assert theirs("import os")["input_ids"][0] == 1
    assert ours.encode("import os") == theirs("import os")["input_ids"][1:]
    assert (ours.bos, ours.eod) == (1, 0)


def test_vocabulary_counts_added_tokens(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = make_hf_folder(tmp_path)
    before = build_tokenizer(folder).vocab_size
    theirs = AutoTokenizer.from_pretrained(folder)
    theirs.add_tokens(["<|extra|>"])
    theirs.save_pretrained(folder)
    after = build_tokenizer(folder)
    assert after.vocab_size == before + 1
    assert max(after.encode("x<|extra|>y")) == before


def test_bytes_match_python_and_open_in_auto_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    ours = build_tokenizer("byte")
    assert (ours.vocab_size, ours.eod, ours.bos) == (257, 256, None)
    assert ours.save_for_huggingface(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == 256 and len(theirs) == 257
    every = "".join(map(chr, range(1, 0x300))) + "\U0001f389<|endoftext|>"
    for text in [*PROBES, *source_texts(), every]:
        assert ours.encode(text) == list(text.encode("utf-8")) == theirs(text)["input_ids"]
        assert ours.decode(ours.encode(text)) == text == theirs.decode(ours.encode(text))


def test_null_tokenizer_passes_ids_through() -> None:
    ours = build_tokenizer("anything", kind="NullTokenizer", vocab_size=50)
    assert (ours.vocab_size, ours.eod) == (50, 49)
    assert ours.encode("0 7 49") == [0, 7, 49] and ours.decode([3, 4]) == "3 4"
    for text in ("50", "-1", "word"):
        with pytest.raises(BadInput):
            ours.encode(text)
    with pytest.raises(BadInput, match="--vocab-size"):
        build_tokenizer("null")


def test_megatron_type_names(spm_path: Path, tmp_path: Path) -> None:
    folder = make_hf_folder(tmp_path)
    assert build_tokenizer(folder, kind="HuggingFaceTokenizer").kind == "huggingface"
    assert build_tokenizer(folder / "tokenizer.json").kind == "huggingface"
    assert build_tokenizer(spm_path, kind="SentencePieceTokenizer").kind == "sentencepiece"
    assert build_tokenizer(spm_path.parent).kind == "sentencepiece"
    assert build_tokenizer("x", kind="ByteLevelTokenizer").kind == "byte"
    with pytest.raises(BadInput, match=r"--tokenizer-type: found TikTokenizer; allowed: Hugging"):
        build_tokenizer("x", kind="TikTokenizer")


def test_what_cannot_be_opened_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "fake.model").write_bytes(b"not a model")
    (tmp_path / "empty").mkdir()
    for name in ("fake.model", "absent.model", "absent/folder/deep", "empty"):
        with pytest.raises(BadInput, match=name) as caught:
            build_tokenizer(tmp_path / name)
        assert "\n" not in str(caught.value)
    with pytest.raises(BadInput, match="no end-of-sequence token"):
        build_tokenizer(make_hf_folder(tmp_path / "hf", eos=None))
    model = train_variant(tmp_path / "noeos.model", model_type="bpe", eos_id=-1)
    with pytest.raises(BadInput, match="no end-of-sentence piece"):
        build_tokenizer(model)
