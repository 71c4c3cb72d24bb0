"""Memory and messages of a layout, computed; checked against small runs; a layout to choose.

Takes a preset or pretrain_gpt.py's flags (or both, the flags last) and the number of GPUs. GiB of
one rank at the highest point of a step; GB that it sends in a step.

Examples:
    python tools/benchmark/memory.py --preset smollm3-3b --gpus 8 --tensor-model-parallel-size 2 \\
        --sequence-parallel --use-distributed-optimizer --micro-batch-size 2 --global-batch-size 256
    python tools/benchmark/memory.py --layouts --markdown
    python tools/benchmark/memory.py --choose --markdown
    python tools/benchmark/memory.py --check
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_lengen.compat import versions
from megatron_lengen.errors import Parser, require, run_main
from megatron_lengen.sizing.layouts import Sizing, candidates, choose, size
from megatron_lengen.sizing.presets import PRESETS, Preset

GIB = 1 << 30
# What a card's driver reports, less a tenth for the CUDA context, NCCL and fragmentation.
CARDS = {"80 GB": 0.9 * 79.6 * GIB, "141 GB": 0.9 * 140.4 * GIB}
GPU_COUNTS = (1, 8, 64)
LENGTHS = (4096, 32768, 131072)

# The same step cut in other ways: what each kind of parallelism does to one rank.
LAYOUTS = {
    "smollm3-3b": (
        "8 GPUs, 256 rows of 4096 a step, one a micro-batch",
        "--global-batch-size 256",
        (
            "",
            "--use-distributed-optimizer",
            "--use-distributed-optimizer --recompute-granularity selective",
            "--use-distributed-optimizer --recompute-granularity selective "
            "--recompute-modules core_attn mlp",
            "--use-distributed-optimizer --recompute-granularity full",
            "--use-distributed-optimizer --tensor-model-parallel-size 4",
            "--use-distributed-optimizer --tensor-model-parallel-size 4 --sequence-parallel",
            "--use-distributed-optimizer --pipeline-model-parallel-size 4",
            "--use-distributed-optimizer --pipeline-model-parallel-size 4 "
            "--num-virtual-stages-per-pipeline-rank 3",
            "--use-distributed-optimizer --context-parallel-size 4",
            "--zero-stage 2",
            "--zero-stage 3",
        ),
    ),
    "nape-400m": (
        "8 GPUs, 256 rows of 2048 a step, 8 a micro-batch",
        "--global-batch-size 256 --micro-batch-size 8",
        (
            "",
            "--use-distributed-optimizer",
            "--use-distributed-optimizer --tensor-model-parallel-size 2 --sequence-parallel",
            "--use-distributed-optimizer --pipeline-model-parallel-size 2",
        ),
    ),
    "mamba2-1.3b": (
        "8 GPUs, 128 rows of 2048 a step, 4 a micro-batch",
        "--global-batch-size 128 --micro-batch-size 4",
        ("", "--use-distributed-optimizer", "--zero-stage 3"),
    ),
    "mamba2-85m": (
        "8 GPUs, 512 rows of 1024 a step, 16 a micro-batch",
        "--global-batch-size 512 --micro-batch-size 16",
        ("", "--use-distributed-optimizer"),
    ),
    "mamba2-45m": (
        "1 GPU, 128 rows of 256 a step",
        "--global-batch-size 128 --micro-batch-size 128",
        ("",),
    ),
}


def build_parser() -> Parser:
    """The tool's own flags; every other flag is the model's."""
    parser = Parser(
        prog="memory.py",
        description=__doc__.splitlines()[0],
        epilog="Every other flag is pretrain_gpt.py's: " + __doc__.split("\n\n")[1],
        allow_abbrev=False,
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--layouts", action="store_true", help="layouts of every preset, compared")
    mode.add_argument("--choose", action="store_true", help="a layout for 1, 8 and 64 GPUs")
    mode.add_argument("--check", action="store_true", help="compare with runs on this machine")
    parser.add_argument("--preset", choices=PRESETS, help="a published model")
    parser.add_argument("--gpus", type=int, default=1, help="processes of the run (default: 1)")
    parser.add_argument(
        "--zero-stage", type=int, choices=(0, 1, 2, 3), default=0, help="DeepSpeed's, if above 0"
    )
    parser.add_argument("--quick", action="store_true", help="with --check: the first runs only")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    return parser


# ---- tables --------------------------------------------------------------------------------------


def describe(sizing: Sizing, title: str) -> list[dict[str, Any]]:
    """One record for each pipeline stage of a layout."""
    return [
        {
            "layout": title,
            "stage": stage,
            **asdict(memory),
            "total": memory.total,
            "sent": traffic._asdict(),
            "bubble": sizing.bubble,
        }
        for stage, (memory, traffic) in enumerate(zip(sizing.stages, sizing.traffic, strict=True))
    ]


MEMORY_HEAD = [
    "layout", "stage", "weights", "gradients", "optimizer", "activations", "peak, GiB",
    "sent TP", "CP", "PP", "DP, GB", "waiting",
]  # fmt: skip


def memory_row(record: dict[str, Any]) -> list[str]:
    """A record as a row under MEMORY_HEAD."""
    moving = record["activations"] + record["working"] + record["buffer"]
    sizes = (record["weights"], record["gradients"], record["optimizer"], moving, record["total"])
    sent = record["sent"]
    messages = (
        sent["tensor"], sent["context"], sent["pipeline"], sent["data"] + sent["embedding"]
    )  # fmt: skip
    return [
        record["layout"],
        str(record["stage"]),
        *(f"{value / GIB:.2f}" for value in sizes),
        *(f"{value / 1e9:.2f}" for value in messages),
        f"{record['bubble']:.1%}",
    ]


def table(head: list[str], rows: list[list[str]], markdown: bool) -> str:
    """Text in columns, or Markdown."""
    if markdown:
        lines = [head, ["---"] * len(head), *rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            [
                line[0].ljust(widths[0]),
                *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True)),
            ]
        )
        for line in [head, *rows]
    )


# ---- layouts and choices -------------------------------------------------------------------------


def layouts(markdown: bool) -> list[dict[str, Any]]:
    """Compare layouts of every preset; prints a table for each."""
    found = []
    for name, (title, common, variants) in LAYOUTS.items():
        preset, records = PRESETS[name], []
        gpus = int(title.split()[0])
        for variant in variants:
            flags = shlex.split(f"{preset.flags} {common} {variant}")
            zero = 0
            if "--zero-stage" in flags:
                place = flags.index("--zero-stage")
                zero = int(flags[place + 1])
                del flags[place : place + 2]
            sizing = size(flags, gpus, preset.mamba2, zero)
            short = layout_name(sizing)
            records.append(max(describe(sizing, short), key=lambda record: record["total"]))
        print(f"\n{preset.title}, {title}\n")
        print(table(MEMORY_HEAD, [memory_row(record) for record in records], markdown))
        found += [{"preset": name, **record} for record in records]
    return found


def layout_name(sizing: Sizing) -> str:
    """A layout in a few letters: TP 4 + SP, DP 2, shared optimizer, recomputing core_attn."""
    config, step = sizing.settings.model, sizing.step
    parts = []
    for letters, number in (
        ("TP", config.tensor_model_parallel_size),
        ("CP", config.context_parallel_size),
        ("PP", config.pipeline_model_parallel_size),
        ("DP", step.data_parallel_size),
    ):
        if number > 1:
            sequence = " + SP" if letters == "TP" and config.sequence_parallel else ""
            parts.append(f"{letters} {number}{sequence}")
        if letters == "PP" and config.virtual_pipeline_model_parallel_size:
            parts[-1] += f" x {config.virtual_pipeline_model_parallel_size}"
    if step.zero_stage:
        parts.append(f"ZeRO {step.zero_stage}")
    if step.distributed_optimizer:
        parts.append("shared optimizer")
    if config.recompute_granularity == "full":
        parts.append("layers recomputed")
    elif config.recompute_granularity:
        parts.append(f"{' and '.join(config.recompute_modules or ())} recomputed")
    return ", ".join(parts) or "one GPU"


def choices(names: Sequence[str], markdown: bool) -> list[dict[str, Any]]:
    """A layout for every preset, length, number of GPUs and card; prints a table for each."""
    found = []
    for name in names:
        rows = []
        for length in LENGTHS:
            for gpus in GPU_COUNTS:
                row = [f"{length // 1024}k", str(gpus)]
                possible = list(candidates(PRESETS[name], length, gpus))
                for card, capacity in CARDS.items():
                    best = choose(possible, int(capacity))
                    row += _choice(PRESETS[name], length, gpus, best)
                    found.append(
                        {"preset": name, "length": length, "gpus": gpus, "card": card}
                        | ({} if best is None else {"stages": describe(best, layout_name(best))})
                    )
                rows.append(row)
        print(f"\n{PRESETS[name].title}\n")
        head = ["tokens", "GPUs"]
        for card in CARDS:
            head += [f"with {card}", "peak, GiB"]
        print(table(head, rows, markdown))
    return found


def _choice(preset: Preset, length: int, gpus: int, best: Sizing | None) -> list[str]:
    if best is not None:
        return [layout_name(best), f"{best.peak / GIB:.0f}"]
    rows = preset.batch_tokens // length
    return [f"at most {rows} GPUs" if preset.mamba2 and rows < gpus else "does not fit", ""]


def comparisons(quick: bool, markdown: bool) -> list[dict[str, Any]]:
    """Compare with runs; prints the rank of each that is furthest off, fails beyond tolerances."""
    from memory_check import check  # beside this file; loads the training loop

    found = check(quick)
    head = ["added to the model", "processes", "peak, MB", "state", "activations", "messages"]
    worst = {  # of a run's ranks
        (one.processes, one.flags): one
        for one in sorted(found, key=lambda one: abs(one.activations - 1))
    }
    rows = [
        [
            worst[key].flags,
            str(worst[key].processes),
            f"{worst[key].peak_bytes / 1e6:.0f}",
            f"{worst[key].state:.3f}",
            f"{worst[key].activations:.3f}",
            f"{worst[key].messages:.3f}",
        ]
        for key in dict.fromkeys((one.processes, one.flags) for one in found)
    ]
    print(table(head, rows, markdown))
    off = [f"{one.flags} (rank {one.rank})" for one in found if not one.holds]
    require(not off, f"--check: beyond the tolerances: {', '.join(off)}")
    return [one._asdict() for one in found]


def one_layout(args: Any, flags: list[str]) -> list[dict[str, Any]]:
    """The layout of the command line, stage by stage."""
    preset = PRESETS.get(args.preset)
    if preset is not None:
        flags = [*shlex.split(preset.flags), *flags]
    sizing = size(flags, args.gpus, preset and preset.mamba2, args.zero_stage)
    records = describe(sizing, layout_name(sizing))
    print(table(MEMORY_HEAD, [memory_row(record) for record in records], args.markdown))
    return records


def main() -> None:
    """Compute or check, print, write."""
    args, flags = build_parser().parse_known_args()
    require(args.gpus >= 1, f"--gpus: found {args.gpus}; allowed: 1 or more")
    several = args.layouts or args.choose or args.check
    require(not (several and flags), f"{' '.join(flags)}: not with --layouts, --choose or --check")
    if args.layouts:
        found = layouts(args.markdown)
    elif args.choose:
        # A step of the preset must hold a row of every length.
        long = [name for name in PRESETS if PRESETS[name].batch_tokens >= max(LENGTHS)]
        found = choices([args.preset] if args.preset else long, args.markdown)
    elif args.check:
        found = comparisons(args.quick, args.markdown)
    else:
        found = one_layout(args, flags)
    if args.json:
        report = {"results": found, "versions": versions()}
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    run_main(main)
