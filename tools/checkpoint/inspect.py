"""Show what a checkpoint or a Hugging Face folder holds, or how two of them differ.

    python tools/checkpoint/inspect.py runs/mine
    python tools/checkpoint/inspect.py runs/mine --iteration 200 --tensors --statistics
    python tools/checkpoint/inspect.py runs/mine --diff my-model

With --diff the exit code is that of diff: 0 for the same model (settings of the architecture, and
tensors bit for bit), 1 for another, 2 for bad input. With --check it is 1 for damage.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

# Last: this folder's inspect.py must not stand for Python's own module of that name.
sys.path.sort(key=str(Path(__file__).resolve().parent).__eq__)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_lengen.errors import BadInput, Parser, run_main

_SHOWN = 20  # tensors that differ, without --tensors


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="inspect.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", help="a run's folder, one iteration, a Hugging Face folder or ID@REVISION"
    )
    parser.add_argument("--iteration", type=int, help="which one of a run; default: the newest")
    parser.add_argument("--diff", metavar="OTHER", help="compare with this model, of either kind")
    parser.add_argument("--settings", action="store_true", help="the architecture, too")
    parser.add_argument("--tensors", action="store_true", help="every tensor, too")
    parser.add_argument(
        "--statistics",
        action="store_true",
        help="with every tensor its mean, standard deviation, largest size and how many elements "
        "are not finite (reads them)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="read everything, the optimizer too, and compare it with the checksums",
    )
    parser.add_argument("--json", action="store_true", help="all of it as one JSON object")
    args = parser.parse_args(argv)
    alone = args.settings or args.statistics or args.check
    if args.diff is not None and alone:
        raise BadInput("--diff: found with --settings, --statistics or --check; allowed: --tensors")
    return args


def main() -> int:
    """Show one model, or compare two."""
    args = parse_arguments()
    from megatron_lengen.convert.stored import open_model

    try:
        model = open_model(args.model, args.iteration)
        if args.diff is not None:
            return _diff(args, model, open_model(args.diff))
        return _show(args, model)
    except BadInput as error:
        raise BadInput(str(error).removeprefix("--load: ")) from error


def _show(args: argparse.Namespace, model: Any) -> int:
    from megatron_lengen.convert.inspection import as_text, describe, table, tensors_of

    found = describe(model, args.check)
    listed = args.tensors or args.statistics
    rows = list(tensors_of(model, args.statistics)) if listed else []
    if args.json:
        print(_json({**found, **({"tensor": rows} if listed else {})}))
    else:
        print(as_text(found))
        if args.settings:
            settings = found["settings"].items()
            print("\n" + table([{"setting": k, "value": str(v)} for k, v in settings]))
        if listed:
            print("\n" + table(rows))
    return int(found.get("damage", "none") not in ("none", "not looked for"))


def _diff(args: argparse.Namespace, one: Any, other: Any) -> int:
    from megatron_lengen.convert.differences import differences
    from megatron_lengen.convert.inspection import table

    found = differences(one, other)
    if args.json:
        print(_json(found))
        return int(not found["same"])
    for title, key in (("settings", "settings"), ("flags, which do not count", "arguments")):
        if found[key]:
            rows = [{"name": k, "one": a, "other": b} for k, (a, b) in found[key].items()]
            print(f"{title}:\n{table([{k: str(v) for k, v in r.items()} for r in rows])}\n")
    for key, label in (("only_in_one", one.label), ("only_in_other", other.label)):
        if found[key]:
            print(f"only in {label}:", *found[key], sep="\n  ", end="\n\n")
    rows = found["tensors"]
    if rows:
        shown = rows if args.tensors else rows[:_SHOWN]
        print(table([_row(row) for row in shown]))
        print("..." if len(shown) < len(rows) else "")
    print(f"{found['equal']} of {found['compared']} tensors are equal bit for bit", end="")
    print("; the same model" if found["same"] else "")
    return int(not found["same"])


def _row(row: dict[str, Any]) -> dict[str, Any]:
    """Both shapes and dtypes only where they differ."""
    texts = {"shape": [("x".join(map(str, shape)) or "-") for shape in row["shape"]]}
    texts["dtype"] = row["dtype"]
    return {
        **row,
        **{k: a if a == b else f"{a} / {b}" for k, (a, b) in texts.items()},
    }


def _json(value: Any) -> str:
    """JSON, in which nan and infinity are words."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [plain(entry) for entry in value]
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        return value

    return json.dumps(plain(value), indent=2)


if __name__ == "__main__":
    run_main(main)
