"""The mean of checkpoints against float64, and what is refused."""

import importlib.util
import json
import os
import shutil
import sys
import weakref
from pathlib import Path

import pytest
import torch
from conversion_models import random_smollm3, tiny_architecture
from safetensors.torch import load_file, save_file

from megatron_lengen.checkpoint_folder import find, write_tracker
from megatron_lengen.config import config_from_architecture
from megatron_lengen.convert import averaging
from megatron_lengen.convert.averaging import average, shares_of
from megatron_lengen.convert.reader import open_checkpoint
from megatron_lengen.convert.stored import open_model
from megatron_lengen.convert.to_hf import checkpoint_to_hf
from megatron_lengen.convert.writer import write_release
from megatron_lengen.errors import BadInput, run_main

TABLE = "embedding.word_embeddings.weight"
LAST_NORM = "decoder.final_layernorm.weight"
EDGES = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 3.0e38, 1 / 3, -7e-12])


def quiet(line):
    """Takes the lines for the user."""


def numbers(seed, dtype=torch.float32):
    """A model of two tensors whose numbers span many magnitudes, padded to 16 rows."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(16, 7, generator=generator) * 10 ** torch.randn(16, 1, generator=generator)
    table[12:] = 0
    return {TABLE: table.to(dtype), LAST_NORM: torch.randn(7, generator=generator).to(dtype)}


def write_iteration(root, number, tensors, **settings):
    """One iteration of a run in `root`."""
    architecture = tiny_architecture(vocab_size=12, make_vocab_size_divisible_by=16, **settings)
    metas = {name: tensor.to("meta") for name, tensor in tensors.items()}
    config = config_from_architecture(architecture)
    written = write_release(
        root / "new",
        config,
        metas,
        tensors.__getitem__,
        write_tokenizer=lambda folder: (folder / "own.txt").write_text(f"tokens of {number}"),
        details={
            "iteration": number,
            "arguments": {"training": {"lr": number}},
            "source": {"family": "llama"},
        },
    )
    os.rename(written, root / f"iter_{number:07d}")
    shutil.rmtree(root / "new")
    write_tracker(root, str(number))


def write_run(root, dtype=torch.float32, models=(10, 20, 30, 40)):
    for number in models:
        write_iteration(root, number, numbers(number, dtype))
    return root


def read_all(folder):
    model = open_checkpoint(folder)
    return {name: model.read(name) for name in model.model_keys}


def mean64(models, weights=None):
    """Independent of the package: stacked, in float64."""
    weights = torch.tensor(weights or [1.0] * len(models), dtype=torch.float64)
    stacked = torch.stack([model.double() for model in models])
    shaped = weights.view(-1, *[1] * (stacked.dim() - 1))
    return (stacked * shaped).sum(0) / weights.sum()


def assert_mean(found, models, weights=None):
    for name, tensor in found.items():
        expected = mean64([model[name] for model in models], weights).to(tensor.dtype)
        # A unit in the last place, where float64 itself falls between two numbers.
        ulp = torch.finfo(tensor.dtype).eps
        torch.testing.assert_close(tensor.double(), expected.double(), rtol=ulp, atol=0)
        assert (tensor == expected).float().mean() > 0.95


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoints_against_float64(tmp_path, dtype):
    root = write_run(tmp_path / "run", dtype)
    folder = average([str(root)], tmp_path / "mean", last=3, report=quiet)
    found = read_all(tmp_path / "mean")
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    assert_mean(found, [numbers(seed, dtype) for seed in (20, 30, 40)])
    # A release: weights only, with what the last model brings.
    assert folder == tmp_path / "mean" / "release" and find(tmp_path / "mean").release
    described = json.loads((folder / "lengen.json").read_text())
    assert [entry["name"] for entry in described["averaged"]] == [
        f"run/iter_00000{n}" for n in (20, 30, 40)
    ]
    assert described["arguments"]["training"]["lr"] == 40 and described["iteration"] == 0
    assert described["source"] == {"family": "llama"}
    assert (folder / "tokenizer" / "own.txt").read_text() == "tokens of 40"
    assert find(root).iteration == 40


def test_which_and_how_much(tmp_path):
    root = write_run(tmp_path / "run")
    models = {n: numbers(n) for n in (10, 20, 30, 40)}
    ways = {
        "iterations": ({"iterations": [40, 10]}, [10, 40], None),
        "weights": ({"last": 2, "weights": [3.0, -1.0]}, [30, 40], [3.0, -1.0]),
        "decay": ({"last": 3, "decay": 0.5}, [20, 30, 40], [0.25, 0.5, 1.0]),
    }
    for name, (how, chosen, weights) in ways.items():
        average([str(root)], tmp_path / name, **how, report=quiet)
        assert_mean(read_all(tmp_path / name), [models[n] for n in chosen], weights)
    loads = [str(root / "iter_0000020"), str(root)]
    average(loads, tmp_path / "loads", dtype="bf16", report=quiet)
    found = read_all(tmp_path / "loads")
    assert found[TABLE].dtype == torch.bfloat16
    assert_mean(found, [models[20], models[40]])


def test_order_is_rounding_at_most(tmp_path):
    root = write_run(tmp_path / "run")
    loads = [str(root / f"iter_00000{n}") for n in (10, 20, 30, 40)]
    average(loads, tmp_path / "a", weights=[1.0, 2.0, 3.0, 5.0], report=quiet)
    average(loads[::-1], tmp_path / "b", weights=[5.0, 3.0, 2.0, 1.0], report=quiet)
    a, b = read_all(tmp_path / "a"), read_all(tmp_path / "b")
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=2**-23, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [None, [0.1, 0.2, 0.7], [1e-3, 3.0, 7.0], [2.0, -1.5, 0.3]])
def test_of_equal_models_it_is_bitwise_the_model(tmp_path, dtype, weights):
    tensors = numbers(1, dtype)
    tensors[LAST_NORM] = EDGES.to(dtype)
    write_iteration(tmp_path / "run", 10, tensors)
    average([str(tmp_path / "run")] * 3, tmp_path / "mean", weights=weights, report=quiet)
    for name, found in read_all(tmp_path / "mean").items():
        # A negative share turns -0.0 into 0.0, which is equal but not bitwise.
        if weights and min(weights) < 0:
            assert torch.equal(found, tensors[name])
        else:
            bits = torch.int32 if dtype == torch.float32 else torch.int16
            assert torch.equal(found.view(bits), tensors[name].view(bits))


def test_padding_of_other_layouts_is_no_difference(tmp_path):
    """A run that went on with more tensor-parallel ranks has more rows behind the vocabulary."""
    root = write_run(tmp_path / "run", models=(10,))
    wide = numbers(20)
    wide[TABLE] = torch.cat([wide[TABLE], torch.zeros(16, 7)])
    write_iteration(root, 20, wide)
    average([str(root)], tmp_path / "mean", last=2, report=quiet)
    assert_mean(read_all(tmp_path / "mean"), [numbers(10), numbers(20)])


# ---- Hugging Face folders ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hf_models(tmp_path_factory):
    """Three folders of one architecture with files besides the weights."""
    root = tmp_path_factory.mktemp("hf")
    for seed in range(3):
        folder = root / f"step-{seed}"
        random_smollm3(folder, layers=2, dtype=torch.bfloat16, seed=seed)
        for name, text in (
            ("tokenizer.json", '{"own":  %d}\r\n'),
            ("modeling_mine.py", "# %d"),
            ("trainer_state.json", "{}"),
            ("README.md", "# step %d"),
            ("additional_chat_templates/tools.jinja", "tools %d"),
        ):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text % seed if "%" in text else text, newline="")
    return root


def weights_in(folder):
    return load_file(folder / "model.safetensors")


def test_folders(hf_models, tmp_path):
    loads = [str(hf_models / f"step-{seed}") for seed in range(3)]
    save = tmp_path / "mean"
    assert average(loads, save, report=quiet) == save
    sources = [weights_in(Path(load)) for load in loads]
    found = weights_in(save)
    assert set(found) == set(sources[0]) and "lm_head.weight" not in found
    assert_mean(found, sources)
    last = hf_models / "step-2"
    travelled = (
        *("config.json", "generation_config.json", "tokenizer.json", "modeling_mine.py"),
        "additional_chat_templates/tools.jinja",
    )
    for name in travelled:
        assert (save / name).read_bytes() == (last / name).read_bytes(), name
    assert not (save / "trainer_state.json").exists()
    card = (save / "README.md").read_text()
    assert "The mean of 3 models' weights" in card and "| `step-1` | 0.333333 |" in card
    assert str(tmp_path) not in card and str(hf_models) not in card
    # It loads, with the embedding as its head.
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(save, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_folder_in_another_dtype_says_so(hf_models, tmp_path):
    loads = [str(hf_models / f"step-{seed}") for seed in range(2)]
    average(loads, tmp_path / "mean", dtype="fp32", report=quiet)
    found = weights_in(tmp_path / "mean")
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    assert_mean(found, [weights_in(Path(load)) for load in loads])
    config = json.loads((tmp_path / "mean" / "config.json").read_text())
    assert config["dtype"] == "float32" and config["model_type"] == "smollm3"


def test_whole_numbers_and_what_stays_fp32(hf_models, tmp_path):
    """Report 12 of the field: A_log, D and dt_bias of Mamba2 keep fp32, also in the average."""
    extra = "backbone.layers.0.mixer.A_log"
    for seed in range(2):
        folder = shutil.copytree(hf_models / f"step-{seed}", tmp_path / str(seed))
        tensors = weights_in(folder)
        tensors[extra] = torch.full((3,), 1 + 2**-20 * seed)
        tensors["counter"] = torch.tensor([7 + seed, 2**60 + seed])
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    average([str(tmp_path / "0"), str(tmp_path / "1")], tmp_path / "m", dtype="bf16", report=quiet)
    found = weights_in(tmp_path / "m")
    assert torch.equal(found["counter"], torch.tensor([8, 2**60 + 1]))
    assert found[extra].dtype == torch.float32
    assert torch.equal(found[extra], torch.full((3,), 1 + 2**-21))
    assert found["model.norm.weight"].dtype == torch.bfloat16
    # Loaders give every tensor the dtype that is written there.
    assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] == "float32"


def test_revisions_of_a_hub_repository(hf_models, tmp_path, monkeypatch):
    import huggingface_hub

    from megatron_lengen.convert import hf_folder

    asked = []

    def snapshot(name, revision=None, allow_patterns=None):
        asked.append((name, revision))
        return str(hf_models / revision)

    monkeypatch.setattr(hf_folder, "check_on_hub", lambda name, flag: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.chdir(tmp_path)
    for number, loads in enumerate(
        (
            ["Org/Model@step-0,step-2"],
            ["Org/Model@step-0 step-2"],
            ["Org/Model@step-0", "Org/Model@step-2"],
        )
    ):
        asked.clear()
        average(loads, tmp_path / str(number), report=quiet)
        assert asked == [("Org/Model", "step-0"), ("Org/Model", "step-2")]
        sources = [weights_in(hf_models / f"step-{seed}") for seed in (0, 2)]
        assert_mean(weights_in(tmp_path / str(number)), sources)
    assert "| `Org/Model@step-2` | 0.5 |" in (tmp_path / "0" / "README.md").read_text()
    with pytest.raises(BadInput, match=r"--save: .* exists already"):
        average(["Org/Model@step-0,step-1"], tmp_path / "0", report=quiet)
    assert len(asked) == 2  # nothing is downloaded for a target that is taken


# ---- what is refused -----------------------------------------------------------------------------


def refused(tmp_path, loads, message, **how):
    save = tmp_path / "refused"
    with pytest.raises(BadInput, match=message) as caught:
        average([str(load) for load in loads], save, **how, report=quiet)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("*refused*"))


def test_bad_choices(tmp_path):
    root = write_run(tmp_path / "run", models=(10, 20))
    there = "iter_0000010, iter_0000020"
    refused(tmp_path, [root], f"--last: found 3; .*there: {there}", last=3)
    refused(tmp_path, [root], "--last: found 0", last=0)
    refused(tmp_path, [root], f"--iteration: found 15; .*there: {there}", iterations=[10, 15])
    refused(tmp_path, [root], "--load: found .* alone; allowed: .*--last K")
    refused(tmp_path, [root, root], "--last: needs one --load; found 2", last=2)
    refused(tmp_path, ["none/there", root], "one kind")
    refused(tmp_path, [root], "--weights: found 1; allowed: one for each of 2", last=2, weights=[1])
    refused(tmp_path, [root], "whose sum is above 0", last=2, weights=[1.0, -1.0])
    refused(tmp_path, [root], "whose sum is above 0", last=2, weights=[1.0, float("nan")])
    refused(tmp_path, [root], "whose sum is above 0", last=2, weights=[1e308, float("inf")])
    refused(tmp_path, [root], "--exponential: found 1.5", last=2, decay=1.5)
    refused(tmp_path, [root], "--iterations: found 10,10; .* once", iterations=[10, 10])
    # Iterations that an older branch left behind the tracked one do not count.
    write_tracker(root, "10")
    refused(tmp_path, [root], "--last: found 2; .*there: iter_0000010$", last=2)


def test_models_that_differ(tmp_path, hf_models):
    def run(name, tensors, **settings):
        root = write_run(tmp_path / name, models=(10,))
        write_iteration(root, 20, tensors, **settings)
        return root

    both = "iter_0000010 and .*iter_0000020 differ in "
    cases = {
        "settings": (run("a", numbers(2), sliding_window=8), "sliding_window: None and 8"),
        "missing": (run("b", {TABLE: numbers(2)[TABLE]}), f"{LAST_NORM}: there and missing"),
        "more": (run("c", {**numbers(2), "decoder.x": EDGES}), "decoder.x: missing and there"),
        "shape": (
            run("d", {**numbers(2), LAST_NORM: torch.ones(8)}),
            rf"{LAST_NORM}: \[7\] float32 and \[8\] float32",
        ),
        "dtype": (
            run("e", numbers(2, torch.bfloat16)),
            r".*weight: \[16, 7\] float32 and .* bfloat16",
        ),
    }
    for root, message in cases.values():
        refused(tmp_path, [root], both + message, last=2)
    refused(tmp_path, [root, hf_models / "step-0"], "allowed: models of one kind")
    other = shutil.copytree(hf_models / "step-1", tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "sliding_window": 16}))
    refused(tmp_path, [hf_models / "step-0", other], "differ in sliding_window: 8 and 16")
    # Who wrote the file is no difference.
    (other / "config.json").write_text(json.dumps({**config, "transformers_version": "4.53"}))
    average([str(hf_models / "step-0"), str(other)], tmp_path / "fine", report=quiet)


def test_damage_and_numbers_that_are_none(tmp_path, hf_models):
    root = write_run(tmp_path / "run")
    (file,) = (root / "iter_0000020").glob("*.distcp")
    whole = file.read_bytes()
    spoilt = bytearray(whole)
    at = whole.index(numbers(20)[LAST_NORM].numpy().tobytes())
    spoilt[at] ^= 1
    file.write_bytes(spoilt)
    refused(tmp_path, [root], rf"iter_0000020/{file.name}: {LAST_NORM} .*damaged", last=4)
    file.write_bytes(whole[:-100])
    refused(tmp_path, [root], f"iter_0000020/{file.name}: cut short", last=4)
    broken = numbers(20)
    broken[LAST_NORM][3] = torch.inf
    shutil.rmtree(root / "iter_0000020")
    write_iteration(root, 20, broken)
    write_tracker(root, "40")
    message = f"iter_0000020: {LAST_NORM} has numbers that are not finite"
    refused(tmp_path, [root], message, last=4)
    short = shutil.copytree(hf_models / "step-1", tmp_path / "short")
    data = (short / "model.safetensors").read_bytes()
    (short / "model.safetensors").write_bytes(data[:-10])
    refused(tmp_path, [hf_models / "step-0", short], "model.safetensors: damaged or cut short")
    large = numbers(1)
    large[LAST_NORM][0] = 3e38
    write_iteration(tmp_path / "large", 10, large)
    write_iteration(tmp_path / "large", 20, numbers(2))
    how = {"last": 2, "weights": [9.0, -8.0]}
    refused(tmp_path, [tmp_path / "large"], "does not fit into torch.float32", **how)


def test_targets(tmp_path, hf_models):
    root = write_run(tmp_path / "run", models=(10, 20))
    average([str(root)], tmp_path / "mean", last=2, report=quiet)
    before = read_all(tmp_path / "mean")
    for how in ({}, {"force": True}):
        with pytest.raises(BadInput, match=r"--save: .* (exists already|holds the iterations)"):
            average([str(root)], root, last=2, **how, report=quiet)
    with pytest.raises(BadInput, match=r"--save: .* exists already"):
        average([str(root)], tmp_path / "mean", last=1, report=quiet)
    assert torch.equal(read_all(tmp_path / "mean")[TABLE], before[TABLE])
    average([str(root)], tmp_path / "mean", last=1, force=True, report=quiet)
    assert torch.equal(read_all(tmp_path / "mean")[TABLE], numbers(20)[TABLE])
    loads = [str(hf_models / "step-0"), str(hf_models / "step-1")]
    with pytest.raises(BadInput, match="is one of --load"):
        average(loads, hf_models / "step-1", force=True, report=quiet)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mean", "run"]


def test_room_is_looked_for_first(tmp_path, monkeypatch):
    root = write_run(tmp_path / "run", models=(10, 20))
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(averaging.shutil, "disk_usage", lambda path: usage)
    refused(tmp_path, [root], "--save: .* GB needed, 1e-07 GB free", last=2)


def test_memory_holds_one_tensor(tmp_path, monkeypatch):
    """Besides the sum, one tensor that was read is alive at a time."""
    root = write_run(tmp_path / "run")
    alive, most = set(), 0
    stored = type(open_model(root))
    read = stored.read

    def watched(self, name):
        nonlocal most
        tensor = read(self, name)
        key = object()
        alive.add(key)
        weakref.finalize(tensor, alive.discard, key)
        most = max(most, len(alive))
        return tensor

    monkeypatch.setattr(stored, "read", watched)
    average([str(root)], tmp_path / "mean", last=4, report=quiet)
    assert most == 1


@pytest.mark.parametrize("size", [5e-324, 1e308])
def test_weights_of_any_size(size):
    assert shares_of(3, [size, size, size]) == [1.0, 1.0, 1.0]


def test_decay_is_by_age():
    assert shares_of(4, decay=0.5) == [0.125, 0.25, 0.5, 1.0]
    assert shares_of(2, decay=1.0) == shares_of(2) == [1.0, 1.0]


# ---- the tool ------------------------------------------------------------------------------------


@pytest.fixture
def tool(monkeypatch, capsys):
    """Runs tools/checkpoint/average.py in this process: (exit code, stdout, stderr)."""
    script = Path(__file__).resolve().parents[3] / "tools" / "checkpoint" / "average.py"
    spec = importlib.util.spec_from_file_location("average_tool", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["average.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            run_main(module.main)
        return left.value.code, *capsys.readouterr()

    return run


def test_the_tool(tool, tmp_path, checkpoint_folder):
    """From two checkpoints to a verified Hugging Face folder."""
    root = shutil.copytree(checkpoint_folder, tmp_path / "run")
    os.rename(root / "release", root / "iter_0000005")
    shutil.copytree(root / "iter_0000005", root / "iter_0000006")
    write_tracker(root, "6")
    code, out, error = tool("--load", root, "--last", 2, "--save", tmp_path / "mean")
    assert code == 0, error
    assert out.splitlines() == [
        "0.5000 run/iter_0000005",
        "0.5000 run/iter_0000006",
        f"mean of 2 models -> {tmp_path / 'mean' / 'release'}",
    ]
    verified = checkpoint_to_hf(tmp_path / "mean", tmp_path / "hf", report=quiet)
    assert verified.worst < 1e-4
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "The weights are a mean: of `run/iter_0000005`, `run/iter_0000006`." in card


def test_bad_input_is_one_line_and_code_2(tool, tmp_path):
    root = write_run(tmp_path / "run", models=(10,))
    for arguments, message in (
        (["--save", "x"], "the following arguments are required: --load"),
        (["--load", root, "--save", "x", "--last", 2], "--last: found 2"),
        (["--load", root, "--save", "x", "--last", 2, "--iterations", "1"], "--iterations: not"),
        (["--load", root, "--save", "x", "--iterations", "1,a"], "--iterations: invalid"),
        (["--load", root, "--save", "x", "--dtype", "fp8"], "--dtype: found fp8"),
    ):
        code, out, error = tool(*arguments)
        assert code == 2 and out == ""
        assert error.startswith(f"error: {message}") and error.count("\n") == 1, error
