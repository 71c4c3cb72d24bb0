"""Memory and speed of conversion, both ways, against copying the same files.

Makes a random Llama and converts it in fresh processes. A copy ends, as a conversion does, when
its bytes are on the disk; before both, the source is read once, so that it is in the page cache.
Beside them transformers reads the same model from its own files and writes it again.

Example:
    python tools/benchmark/convert.py --folder /scratch/convert --json convert.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from timing import report_file, write_report

from megatron_lengen.errors import Parser, require, run_main

TOOL = Path(__file__).resolve().parents[1] / "checkpoint" / "convert.py"
HIDDEN, FFN, HEADS, GROUPS = 2048, 5632, 32, 8
VOCABULARY = 30_000  # tables of 123 MB, the largest tensors
SHARD = 10**9
BIN_FILES = 3
# Runs a command from a process of its own: the kernel counts what a parent had as its child's.
WATCH = """
import resource, subprocess, sys, time
start = time.perf_counter()
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
seconds, used = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
print(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss)
sys.exit(code)
"""
# What transformers does with a folder of its own.
RESAVE = """
import sys
from transformers import AutoModelForCausalLM, logging
logging.disable_progress_bar()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="bfloat16")
model.save_pretrained(sys.argv[2])
"""
FORMS = ("one file", "shards", ".bin")


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(prog="convert.py", description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=float, default=3.0, help="GB of weights (default: 3)")
    parser.add_argument("--repeat", type=int, default=2, help="times; the shortest counts")
    parser.add_argument("--workers", type=int, help="as of convert.py")
    parser.add_argument("--folder", help="where files go (default: the folder for temporary ones)")
    parser.add_argument("--verify", action="store_true", help="verify too, in the last column")
    parser.add_argument(
        "--json", type=report_file, metavar="FILE", help="also write the results there"
    )
    return parser


# ---- the model -----------------------------------------------------------------------------------


def configuration(layers: int) -> dict[str, Any]:
    """config.json of a model of so many layers."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor by name."""
    keys = HIDDEN // HEADS * GROUPS
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(layers):
        of_layer = {
            "input_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (keys, HIDDEN),
            "self_attn.v_proj": (keys, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "post_attention_layernorm": (HIDDEN,),
            "mlp.gate_proj": (FFN, HIDDEN),
            "mlp.up_proj": (FFN, HIDDEN),
            "mlp.down_proj": (HIDDEN, FFN),
        }
        out |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return {**out, "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def layers_for(size: float) -> int:
    """How many layers make a model of so many GB."""
    tables = 2 * 2 * VOCABULARY * HIDDEN
    layer = 2 * (HIDDEN * HIDDEN * (2 + 2 * GROUPS // HEADS) + 3 * HIDDEN * FFN)
    return max(1, round((size * 1e9 - tables) / layer))


def bin_file(number: int) -> str:
    """Name of a file in the older form."""
    return f"pytorch_model-{number + 1:05d}-of-{BIN_FILES:05d}.bin"


def make_model(folder: Path, layers: int, form: str) -> None:
    """Random weights in one of the FORMS."""
    import torch

    from megatron_lengen.convert.safetensors_files import ShardWriter

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(configuration(layers), indent=2))
    generator = torch.Generator().manual_seed(0)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        # Numbers near 0.02 from random bits: drawing normal ones takes longer than all the rest.
        bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator)
        return (bits.bfloat16() / 2**15 * 0.03 + (len(shape) == 1)).contiguous()

    wanted = shapes(layers)
    if form == ".bin":
        for number in range(BIN_FILES):
            names = list(wanted)[number::BIN_FILES]
            torch.save({name: draw(wanted[name]) for name in names}, folder / bin_file(number))
        places = {name: bin_file(place % BIN_FILES) for place, name in enumerate(wanted)}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
        return
    metas = {
        name: torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for name, shape in wanted.items()
    }
    with ShardWriter(folder, metas, SHARD if form == "shards" else 10**15) as writer:
        for name, shape in wanted.items():
            writer.add(name, draw(shape))


# ---- measuring -----------------------------------------------------------------------------------


def files_of(folder: Path) -> list[Path]:
    """All files in a folder, at any depth."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def warm(folder: Path) -> None:
    """Read a folder's files, and wait until nothing is left to write."""
    for path in files_of(folder):
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 24):
                pass
    os.sync()


def copy(source: Path, target: Path) -> tuple[float, float]:
    """Copy all files to an empty place on the same disk, for good; seconds, and of a CPU."""
    warm(source)
    target.mkdir()
    start, used = time.perf_counter(), time.process_time()
    for number, path in enumerate(files_of(source)):
        shutil.copyfile(path, target / str(number))
        with open(target / str(number), "rb") as file:
            os.fsync(file.fileno())
    taken = time.perf_counter() - start, time.process_time() - used
    shutil.rmtree(target)
    return taken


def convert(way: str, source: Path, target: Path, *flags: str) -> tuple[float, float, int]:
    """Seconds of a fresh process, those of a CPU, and the most memory that it had, in bytes."""
    return watched(source, target, TOOL, way, "--load", source, "--save", target, *flags)


def resave(source: Path, target: Path) -> tuple[float, float, int]:
    """The same of transformers, from its files to its files."""
    return watched(source, target, "-c", RESAVE, source, target)


def watched(source: Path, target: Path, *arguments: str | Path) -> tuple[float, float, int]:
    """The same of Python with these arguments; the target is not there before."""
    shutil.rmtree(target, ignore_errors=True)
    warm(source)
    done = subprocess.run(
        [sys.executable, "-c", WATCH, sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
    )
    require(done.returncode == 0, f"{arguments[0]} {arguments[1]}: exit code {done.returncode}")
    seconds, cpu, kilobytes = done.stdout.split()[-3:]
    return float(seconds), float(cpu), int(kilobytes) * 1024


def measure(args: argparse.Namespace, place: Path) -> Iterator[dict[str, Any]]:
    """One record for each way and form of the source."""
    flags = ["--no-verify"] + (["--workers", str(args.workers)] if args.workers else [])
    make_model(place / "tiny", 1, "one file")
    # Importing PyTorch and Megatron-Core takes seconds, whatever the model.
    starts = [convert("to-megatron", place / "tiny", place / "out", *flags) for _ in "ab"]
    small = copy(place / "tiny", place / "copy")
    start, start_cpu = (
        min(two) - less
        for two, less in zip(list(zip(*starts, strict=True))[:2], small, strict=True)
    )
    layers, release = layers_for(args.size), place / "release"
    for form in (*FORMS, None):
        way, source, target = "to-megatron", place / "source", release
        if form is None:
            way, source, target = "to-hf", release, place / "out"
        else:
            shutil.rmtree(source, ignore_errors=True)
            make_model(source, layers, form)
        size = sum(path.stat().st_size for path in files_of(source))
        copies, runs = [], []
        for _ in range(args.repeat):
            copies.append(copy(source, place / "copy"))
            runs.append(convert(way, source, target, *flags))
        copied, copied_cpu = map(min, zip(*copies, strict=True))
        taken, cpu, _ = map(min, zip(*runs, strict=True))
        record = {
            "way": way,
            "source": form or "checkpoint",
            "bytes": size,
            "copy_seconds": copied,
            "seconds": taken,
            "start_seconds": start,
            "speed_to_copying": copied / taken,
            "speed_to_copying_once_started": copied / (taken - start),
            "copy_cpu_seconds": copied_cpu,
            "cpu_seconds_once_started": cpu - start_cpu,
            "peak_bytes": max(memory for *_, memory in runs),
        }
        if form == FORMS[0]:
            others = [resave(source, place / "resaved") for _ in range(args.repeat)]
            shutil.rmtree(place / "resaved")
            record |= {
                "transformers_seconds": min(seconds for seconds, *_ in others),
                "transformers_peak_bytes": max(memory for *_, memory in others),
            }
        if args.verify and form in (None, FORMS[0]):
            verified = convert(way, source, target, *flags[1:])
            record |= {"verified_seconds": verified[0], "verified_peak_bytes": verified[2]}
        yield record


def table(records: list[dict[str, Any]]) -> str:
    """The records as text."""
    lines = [
        f"{'way':<12} {'source':<11} {'GB':>5} {'copy, s':>8} {'all, s':>7} {'start, s':>8} "
        f"{'speed':>6} {'started':>7} {'CPU, s':>7} {'copy':>5} {'peak, MB':>8}"
    ]
    for row in records:
        line = (
            f"{row['way']:<12} {row['source']:<11} {row['bytes'] / 1e9:>5.2f} "
            f"{row['copy_seconds']:>8.2f} {row['seconds']:>7.2f} {row['start_seconds']:>8.2f} "
            f"{row['speed_to_copying']:>6.2f} {row['speed_to_copying_once_started']:>7.2f} "
            f"{row['cpu_seconds_once_started']:>7.2f} {row['copy_cpu_seconds']:>5.2f} "
            f"{row['peak_bytes'] / 1e6:>8.0f}"
        )
        if "transformers_seconds" in row:
            line += (
                f"  transformers: {row['transformers_seconds']:.1f} s, "
                f"{row['transformers_peak_bytes'] / 1e6:.0f} MB"
            )
        if "verified_seconds" in row:
            line += (
                f"  verified: {row['verified_seconds']:.1f} s, "
                f"{row['verified_peak_bytes'] / 1e6:.0f} MB"
            )
        lines.append(line)
    return "\n".join(lines)


def main() -> int:
    """Make, convert, print, write."""
    args = build_parser().parse_args()
    require(args.repeat >= 1, f"--repeat: found {args.repeat}; allowed: 1 or more")
    require(args.size > 0, f"--size: found {args.size}; allowed: above 0")
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        free = shutil.disk_usage(place).free
        needed = 4.2 * args.size * 1e9
        require(free > needed, f"--size: {needed / 1e9:.0f} GB needed, {free / 1e9:.0f} GB free")
        records = list(measure(args, Path(place)))
    print("speed: that of a conversion, in parts of a copy's; started, and CPU: without the start")
    print(table(records))
    write_report(args.json, vars(args), results=records)
    return 0


if __name__ == "__main__":
    run_main(main)
