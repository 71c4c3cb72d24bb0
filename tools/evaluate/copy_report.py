"""One report on copy-task runs over several seeds: writes report.md, report.json and report.png.

Example:
    python tools/evaluate/copy_report.py --runs wd=OUT/wd-1 wd=OUT/wd-2 vpad=OUT/vpad-1 --output OUT
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_lengen.errors import Parser, run_main
from megatron_lengen.evaluation import results


def build_parser() -> Parser:
    parser = Parser(
        prog="copy_report.py",
        description="Set settings side by side, each as mean and standard deviation over its runs. "
        "Each folder holds copy_task/results.json (of tools/evaluate/copy_task.py). An earlier "
        "report is replaced.",
    )
    parser.add_argument(
        "--runs",
        nargs="+",
        type=results.named_folder,
        required=True,
        metavar="NAME=DIR",
        help="runs; those of one name are seeds of one setting (wd, no_wd, pl_d and vpad have "
        "colours of their own)",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the report")
    parser.add_argument("--title", default="The copy task", help="heading of the report")
    return parser


def main() -> int:
    args = build_parser().parse_args()
    from megatron_lengen.evaluation import copy_report

    runs: dict[str, list] = {}
    for name, folder in args.runs:
        runs.setdefault(name, []).append(copy_report.load_run(folder))
    folder = results.prepare_output(args.output)
    print(copy_report.write_report(folder, runs, args.title))
    print(f"written: {folder / 'report.md'}, report.json, report.png")
    return 0


if __name__ == "__main__":
    run_main(main)
