"""One report on several models: writes report.md, report.json and report.png, prints the table.

Example:
    python tools/evaluate/report.py --runs wd=OUT/wd no_wd=OUT/no_wd vpad=OUT/vpad --output OUT
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_lengen.errors import Parser, require, run_main
from megatron_lengen.evaluation import results


def build_parser() -> Parser:
    parser = Parser(
        prog="report.py",
        description="Set models side by side. Each folder holds position_loss/results.json, "
        "needle/results.json and metrics.jsonl, or some of them. An earlier report is replaced.",
    )
    parser.add_argument(
        "--runs",
        nargs="+",
        type=results.named_folder,
        required=True,
        metavar="NAME=DIR",
        help="models; wd, no_wd and vpad come first and have colours of their own",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the report")
    parser.add_argument("--title", default="Length generalization", help="heading of the report")
    parser.add_argument(
        "--train-length",
        type=results.positive,
        metavar="T",
        help="training length (default: the one in the results)",
    )
    return parser


def main() -> int:
    args = build_parser().parse_args()
    names = [name for name, _ in args.runs]
    require(len(set(names)) == len(names), f"--runs: found a name twice in {', '.join(names)}")
    from megatron_lengen.evaluation import report

    runs = {name: report.load_run(folder) for name, folder in args.runs}
    folder = results.prepare_output(args.output)
    print(report.write_report(folder, runs, args.title, args.train_length))
    print(f"written: {folder / 'report.md'}, report.json, report.png")
    return 0


if __name__ == "__main__":
    run_main(main)
