"""Everything that only a GPU can say, in one run: stages with times of their own, and targets.

`gpu_check.sh` starts it. Each stage is a process (or several) that is stopped when its time is
over; what it had written until then counts, and a stage that fails stops no other. What stages do
not use goes to the training runs at the end; runs for which no time is left are left out. What is
found is in gpu_check.json after every stage.

Example:
    bash tools/benchmark/gpu_check.sh --output results
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu_stages import BENCHMARKS, VARIANTS, targets, training_command, training_rows
from timing import check_device, write_report

from megatron_lengen.errors import Parser, require, run_main

ROOT = Path(__file__).resolve().parents[2]
STAGES = (*BENCHMARKS, "train")
TO_LEAVE = 5.0  # seconds between asking a process to leave and ending it
STARTING = 12.0  # seconds of a training process before its first step
LEAST, MOST = 20.0, 60.0  # seconds of a training process: less makes no step, more shows no more
LEFT_OUT = "left out"
TAIL = 15  # lines of a failed stage's output that are kept


class Outcome(NamedTuple):
    """How a stage's process ended; `reason` is empty where it ended well."""

    seconds: float
    reason: str
    output: list[str]


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(prog="gpu_check.py", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: cuda)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, for trying it")
    parser.add_argument("--minutes", type=float, default=8, help="for all stages (default: 8)")
    parser.add_argument("--stages", choices=STAGES, nargs="+", default=list(STAGES), help="all")
    parser.add_argument("--variants", choices=VARIANTS, nargs="+", default=list(VARIANTS))
    parser.add_argument("--output", help="folder of the results (default: $OUT, or runs/gpu_check)")
    return parser


# ---- processes -----------------------------------------------------------------------------------


def run_for(command: list[str], seconds: float, log: Path) -> Outcome:
    """Run a command for so many seconds at most: asked to leave, then ended with its children."""
    start = time.monotonic()
    with open(log, "w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
            start_new_session=True,
        )
        reason = ""
        try:
            code = process.wait(timeout=seconds)
            if code:
                reason = f"exit code {code}"
        except subprocess.TimeoutExpired:
            reason = f"stopped after {seconds:.0f} s"
            _end(process)
        except BaseException:
            _end(process)
            raise
    lines = log.read_text(errors="replace").splitlines()
    return Outcome(time.monotonic() - start, reason, lines)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the process group to leave, then end it."""
    for number, patience in ((signal.SIGTERM, TO_LEAVE), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            continue


def why(outcome: Outcome) -> str:
    """The reason with the last line of an error, or the last line there is."""
    lines = [line.strip() for line in outcome.output if line.strip()]
    said = [line for line in lines if "rror" in line] or lines
    return outcome.reason + (f": {said[-1][:160]}" if said else "").replace(f"{ROOT}/", "")


# ---- stages --------------------------------------------------------------------------------------


class Check:
    """The run: its clock, its folder, what stages found."""

    def __init__(self, args: argparse.Namespace, folder: Path, scratch: Path) -> None:
        self.args, self.folder, self.scratch = args, folder, scratch
        self.end = time.monotonic() + 60 * args.minutes
        self.stages: list[dict[str, Any]] = []
        self.found: dict[str, Any] = {}  # reports of benchmarks by stage

    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def benchmark(self, name: str) -> None:
        """A stage that is one script of this folder, which writes a report."""
        stage = BENCHMARKS[name]
        kept = self.scratch if name == "tests" else self.folder
        file = kept / f"{name}_{self.args.device}.json"
        file.unlink(missing_ok=True)
        seconds = min(stage.seconds, self.left())
        words = stage.quick if self.args.quick else stage.flags
        command = [sys.executable, str(Path(__file__).parent / stage.script)]
        command += words.format(device=self.args.device, seconds=0.7 * seconds).split()
        command += ["--json", str(file)]
        outcome = run_for(command, seconds, self.scratch / f"{name}.log")
        rows: list[tuple[str, str]] = []
        reason = why(outcome) if outcome.reason else ""
        if file.exists():
            try:
                self.found[name] = json.loads(file.read_text())
                rows = stage.rows(self.found[name])
            except (KeyError, TypeError, ValueError) as error:
                self.found.pop(name, None)
                reason = reason or f"its report: {type(error).__name__}: {error}"
        elif not reason:
            reason = "no report"
        self._note(name, outcome, reason, rows)

    def training(self) -> None:
        """A short run of every variant; the time that is left is shared."""
        names = self.args.variants
        for number, name in enumerate(names):
            left = self.left() - TO_LEAVE
            if left < LEAST:
                self._note(f"train {name}", Outcome(0.0, "", []), "no time is left", [], LEFT_OUT)
                continue
            # The first compiles what others find compiled, and has two shares.
            shares = 2 if number == 0 else 1
            share = shares * left / (len(names) - number + shares - 1)
            seconds = min(MOST, max(LEAST, share), left)
            metrics = self.scratch / f"{name}.jsonl"
            command = training_command(name, self.args.quick, metrics, self.scratch)
            minutes = max(2.0, seconds - STARTING) / 60
            command += ["--exit-duration-in-mins", f"{minutes:.4f}"]
            outcome = run_for(
                [sys.executable, "-W", "ignore", *command], seconds, self.scratch / f"{name}.log"
            )
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            steps = [json.loads(line) for line in lines]
            rows, fault, figures = training_rows(steps)
            if fault or outcome.reason.startswith("exit code"):
                fault = "; ".join(filter(None, (why(outcome) if outcome.reason else "", fault)))
            self.found[f"train {name}"] = figures
            self._note(f"train {name}", outcome, fault, rows)

    def _note(
        self,
        name: str,
        outcome: Outcome,
        reason: str,
        rows: list[tuple[str, str]],
        status: str | None = None,
    ) -> None:
        stage: dict[str, Any] = {
            "stage": name,
            "status": status or ("failed" if reason else "done"),
            "seconds": round(outcome.seconds, 1),
            "reason": reason,
            "rows": [{"what": what, "found": text} for what, text in rows],
            "figures": self.found.get(name) if name.startswith("train ") else None,
        }
        if reason:
            stage["output"] = outcome.output[-TAIL:]
        self.stages.append(stage)
        print(described(stage), flush=True)
        self.write()

    def of_status(self, status: str) -> list[str]:
        """Names of stages."""
        return [stage["stage"] for stage in self.stages if stage["status"] == status]

    def targets(self) -> list[dict[str, Any]]:
        """What is aimed at and what was found so far; tiny sizes say nothing of speed."""
        return targets({} if self.args.quick else self.found)

    def write(self) -> None:
        """Everything so far into gpu_check.json."""
        settings = {key: value for key, value in vars(self.args).items() if key != "output"}
        file = str(self.folder / "gpu_check.json")
        write_report(file, settings, stages=self.stages, targets=self.targets())


def described(stage: dict[str, Any]) -> str:
    """A stage as lines of the table."""
    head = f"{stage['stage']:<18} {stage['status']:<8} {stage['seconds']:>6.1f} s  "
    lines = [head + stage["reason"]]
    lines += [f"    {row['what']:<36} {row['found']}" for row in stage["rows"]]
    return "\n".join(line.rstrip() for line in lines)


def table_of_targets(found: list[dict[str, Any]]) -> str:
    """The targets as text."""
    lines = [f"{'target':<44} {'wanted':>10} {'found':>10}  outcome"]
    for target in found:
        value = "-" if target["found"] is None else f"{target['found']:.1%}"
        wanted = f"{target['sense']} {target['wanted']:.0%}"
        lines.append(f"{target['what']:<44} {wanted:>10} {value:>10}  {target['outcome']}")
    return "\n".join(lines)


def main() -> int:
    """Run the stages, print, write; 1 where a stage failed or a target is missed."""
    args = build_parser().parse_args()
    check_device(args.device)
    require(args.minutes > 0, f"--minutes: found {args.minutes}; allowed: above 0")
    folder = Path(args.output or os.environ.get("OUT") or ROOT / "runs" / "gpu_check").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp())
    try:
        check = Check(args, folder, scratch)
        for name in args.stages:
            if name == "train":
                check.training()
            else:
                check.benchmark(name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    aims, failed = check.targets(), check.of_status("failed")
    print(f"\n{table_of_targets(aims)}")
    print(
        f"{len(check.of_status('done'))} stages done, failed: {', '.join(failed) or 'none'}, left "
        f"out: {', '.join(check.of_status(LEFT_OUT)) or 'none'}"
    )
    missed = any(aim["outcome"] == "missed" for aim in aims)
    return int(bool(failed) or missed)


if __name__ == "__main__":
    run_main(main)
