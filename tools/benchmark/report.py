"""Make the page of measured speed from the benchmarks' JSON reports; nothing in it is hand-written.

A section for each benchmark says what it is in the words of its own documentation; each report in
it shows its command, its machine, the versions and a table. The same reports give the same page.

Example:
    python tools/benchmark/report.py --results docs/performance --output docs/performance.md
"""

from __future__ import annotations

import ast
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_lengen.errors import Parser, require, run_main

ROOT = Path(__file__).resolve().parents[2]
# Benchmarks in the order of the page; others come behind, by name.
ORDER = (
    "norm", "cross_entropy", "attention", "ssd", "mamba", "step", "preprocess", "convert",
    "gpu_check",
)  # fmt: skip
OWN = ("command", "settings", "machine", "versions", "results")  # what every report has
LEFT_OUT = ("figures", "output")  # fields that only a program reads
NOT_MEASURED = "-"
START = """# Measured speed

Made from the reports in `{folder}/`, which `bash tools/benchmark/run_all.sh` writes; not to be
edited. The forms of a table ran in turn, in the same minutes on the same machine. This page again:

```bash
{command}
```
"""


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(prog="report.py", description=__doc__.splitlines()[0])
    parser.add_argument("--results", required=True, metavar="DIR", help="folder of *.json")
    parser.add_argument("--output", metavar="FILE", help="the page (default: printed)")
    return parser


# ---- values --------------------------------------------------------------------------------------


def column(key: str, values: Sequence[Any]) -> tuple[str, Callable[[Any], str]]:
    """A column's title, with its unit, and what writes one of its values."""
    numbers = [value for value in values if isinstance(value, int | float)]
    title = key.replace("_", " ")
    if key == "seconds" or key.endswith("_seconds"):
        if numbers and max(numbers) < 1:
            return f"{title.removesuffix('seconds')}ms".strip(), lambda v: three_digits(1e3 * v)
        return title, three_digits
    if key == "bytes" or key.endswith("_bytes"):
        return f"{title.removesuffix('bytes')}MB".strip(), lambda v: f"{v / 1e6:.0f}"
    if key == "ratio":
        return "ratio", lambda v: three_digits(v) if v < 0.1 else f"{v:.2f}"
    if key == "mfu":
        return "MFU", lambda v: f"{v:.1%}"
    if key == "tflops":
        return "TFLOP/s", three_digits
    if key.startswith(("of_", "cost_of", "share_of")):
        return title, lambda v: f"{v:.1%}"
    if key.endswith("_per_second"):
        unit = title.removesuffix(" per second")
        unit = {"gigabytes": "GB", "megabytes": "MB"}.get(unit, unit)
        return f"{unit}/s", lambda v: f"{v:.0f}" if v >= 100 else three_digits(v)
    return "MiB" if key == "mebibytes" else title, plain


def plain(value: Any) -> str:
    """A value of no known meaning."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return three_digits(value)
    if isinstance(value, list):  # of a stage: what, and what was found
        pairs = [f"{one['what']}: {one['found']}" for one in value if isinstance(one, dict)]
        return "<br>".join(pairs) if pairs else ", ".join(map(str, value))
    return str(value)


def three_digits(value: float) -> str:
    """Without an exponent, and with no digits that say nothing."""
    if value == 0:
        return "0"
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    while digits < 9 and size * 10**digits < 10:
        digits += 1
    return f"{value:.{digits}f}"


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Rows as a Markdown table; a column for every field that any of them has."""
    keys = [key for key in dict.fromkeys(k for row in rows for k in row) if key not in LEFT_OUT]
    keys = [key for key in keys if any(row.get(key) not in (None, "", []) for row in rows)]
    columns = [column(key, [row.get(key) for row in rows]) for key in keys]
    lines = [
        "| " + " | ".join(title for title, _ in columns) + " |",
        "|" + "---|" * len(columns),
    ]
    for row in rows:
        cells = [
            NOT_MEASURED if row.get(key) is None else write(row[key])
            for key, (_, write) in zip(keys, columns, strict=True)
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def by_part(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The rows, or those of each `part` where parts have other fields than one another."""
    parts: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        parts.setdefault(row.get("part"), []).append(row)
    fields = {frozenset(key for row in part for key in row) for part in parts.values()}
    return list(parts.values()) if len(fields) > 1 else [rows] if rows else []


# ---- sections ------------------------------------------------------------------------------------


def script_of(report: dict[str, Any]) -> Path:
    """The benchmark that made a report."""
    return Path(shlex.split(report["command"])[1])


def documentation(script: Path) -> list[str]:
    """A script's docstring as lines, from its title on, without its examples."""
    text = ast.get_docstring(ast.parse((ROOT / script).read_text())) or script.name
    lines = text.splitlines()
    ends = [i for i, line in enumerate(lines) if line.rstrip() in ("Example:", "Examples:")]
    return lines[: ends[0]] if ends else lines


def machine(report: dict[str, Any]) -> str:
    """The machine and the versions in one line."""
    found = report["machine"]
    parts = [f"{found['cpu']}, {found['cores']} cores, {found['memory_gib']} GiB"]
    if found.get("gpu"):
        parts.append(f"{found['gpu']}, {found['gpu_memory_gib']} GiB, CUDA {found['cuda']}")
    parts.append(
        ", ".join(f"{name} {number}" for name, number in report["versions"].items() if number)
    )
    return "; ".join(parts) + "."


def section(name: str, report: dict[str, Any]) -> list[str]:
    """One report: command, machine, single values, tables."""
    lines = [f"### {name}", "", "```bash", report["command"], "```", "", machine(report), ""]
    others = {key: value for key, value in report.items() if key not in OWN}
    single = {k: v for k, v in others.items() if not isinstance(v, list | dict) and v is not None}
    if single:
        said = []
        for key, value in single.items():
            title, write = column(key, [value])
            said.append(f"{title}: {write(value)}")
        lines += ["; ".join(said) + ".", ""]
    for rows in by_part(report.get("results", [])):
        lines += [*table(rows), ""]
    for key, value in others.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            lines += [f"{key.replace('_', ' ').capitalize()}:", "", *table(value), ""]
    return lines


def page(reports: Iterable[tuple[str, dict[str, Any]]], command: str, folder: str) -> str:
    """The whole page.

    Args:
        reports: name and content of each.
        command: what makes the page.
        folder: where the reports are, as the page names it.
    """
    by_script: dict[Path, list[tuple[str, dict[str, Any]]]] = {}
    for name, report in sorted(reports, key=lambda one: one[0]):
        by_script.setdefault(script_of(report), []).append((name, report))

    def place(script: Path) -> tuple[int, str]:
        known = script.stem in ORDER
        return (ORDER.index(script.stem) if known else len(ORDER), script.stem)

    lines = [*START.format(command=command, folder=folder).splitlines(), ""]
    for script in sorted(by_script, key=place):
        title, *rest = documentation(script)
        lines += [f"## {title.rstrip('.')}", ""]
        lines += [*_as_markdown(rest), ""] if any(rest) else []
        for name, report in by_script[script]:
            lines += section(name, report)
    while lines and not lines[-1]:
        lines.pop()
    return "\n".join(lines) + "\n"


def _as_markdown(lines: list[str]) -> list[str]:
    """A docstring's lines; what it indents stays as it is laid out there."""
    text = "\n".join(lines).strip("\n").splitlines()
    found: list[str] = []
    inside = False
    for line in text:
        indented = line.startswith("  ")
        if indented != inside and line:
            found += ["", "```text"] if indented else ["```", ""]
            inside = indented
        found.append(line)
    if inside:
        found.append("```")
    kept = [line for i, line in enumerate(found) if line or (i and found[i - 1])]
    return _without_gap_before_fence(kept)


def _without_gap_before_fence(lines: list[str]) -> list[str]:
    """No empty line just inside the end of a block."""
    return [
        line for i, line in enumerate(lines) if line or i + 1 == len(lines) or lines[i + 1] != "```"
    ]


def read(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Name and content of every report in a folder.

    Raises:
        BadInput: where there is none, or one is not a benchmark's.
    """
    files = sorted(folder.glob("*.json"))
    require(bool(files), f"--results: found no *.json in {folder}")
    found = []
    for file in files:
        try:
            report = json.loads(file.read_text())
            is_report = all(key in report for key in OWN[:-1]) and "cpu" in report["machine"]
            script_of(report)
        except (ValueError, TypeError, LookupError):
            is_report = False
        require(is_report, f"--results: found {file}, which no benchmark wrote with --json")
        script = ROOT / script_of(report)
        require(script.is_file(), f"--results: {file} names {script_of(report)}, which is not here")
        found.append((file.stem, report))
    return found


def shown(path: Path) -> str:
    """A path as one would write it in the repository."""
    path = path.resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def remade(folder: Path, output: Path | None) -> str:
    """The page of the reports in a folder, as it stands in `output`."""
    file = "FILE" if output is None else shown(output)
    command = f"python tools/benchmark/report.py --results {shown(folder)} --output {file}"
    return page(read(folder), command, shown(folder))


def main() -> int:
    """Read, make, write."""
    args = build_parser().parse_args()
    output = Path(args.output) if args.output else None
    text = remade(Path(args.results), output)
    if output is None:
        print(text, end="")
    else:
        output.write_text(text)
    return 0


if __name__ == "__main__":
    run_main(main)
