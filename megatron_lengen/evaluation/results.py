"""The results of one evaluation: a folder with results.json and a picture, written once.

results.json appears last and at once, so a folder that has it is complete. A tool that is started
again with the same settings finds it and is done; other settings need `--force`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_lengen import __version__
from megatron_lengen.errors import BadInput, missing_package

RESULTS_NAME = "results.json"
_PACKAGES = ("torch", "transformers", "megatron-core", "numpy")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that every evaluation has: which model, where it runs, where results go."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        required=True,
        metavar="FOLDER_OR_ID",
        help="Hugging Face folder, Megatron checkpoint folder, or hub id",
    )
    group.add_argument("--iteration", type=int, help="iteration of a checkpoint (default: latest)")
    group.add_argument("--revision", help="revision of a hub id")
    group.add_argument(
        "--tokenizer",
        metavar="FOLDER_OR_ID",
        help="tokenizer to use instead of the model's own",
    )
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: auto)")
    group.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "fp32", "bf16", "fp16"),
        help="compute type (default: auto, which is bf16 on CUDA and fp32 on CPU)",
    )
    group = parser.add_argument_group("results")
    group.add_argument("--output", required=True, metavar="DIR", help="folder for the results")
    group.add_argument(
        "--force", action="store_true", help="overwrite results of other settings in --output"
    )


def add_task_arguments(
    parser: argparse.ArgumentParser, *, lengths_of: str, samples: int, batch_tokens: int
) -> argparse._ArgumentGroup:
    """The flags of a task with samples at several lengths, with these defaults.

    Args:
        lengths_of: what --lengths count.
        samples: at each length.
        batch_tokens: computed at a time.
    """
    group = parser.add_argument_group("task")
    group.add_argument("--lengths", type=lengths, required=True, metavar="N,N,...", help=lengths_of)
    group.add_argument(
        "--samples", type=positive, default=samples, help=f"at each length (default: {samples})"
    )
    group.add_argument("--seed", type=int, default=42, help="decides the samples (default: 42)")
    group.add_argument(
        "--batch-tokens",
        type=positive,
        default=batch_tokens,
        help=f"tokens computed at a time, one sample at least (default: {batch_tokens})",
    )
    return group


def model_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What `add_model_arguments` read, as far as results depend on it."""
    return {"tokenizer": args.tokenizer, "device": args.device, "dtype": args.dtype}


def positive(text: str) -> int:
    """An argparse type: a whole number of 1 or more."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text}; allowed: whole numbers of 1 or more")
    return int(text)


def lengths(text: str) -> list[int]:
    """An argparse type: lengths from `256,512`, in order and once each."""
    return sorted({positive(part.strip()) for part in text.split(",")})


def named_folder(text: str) -> tuple[str, Path]:
    """An argparse type: name and folder from `vpad=DIR`."""
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"found {text}; allowed: NAME=DIR")
    return name, Path(folder)


def versions() -> dict[str, str | None]:
    """Versions of what produced a result; None for a package that is not installed."""
    found: dict[str, str | None] = {
        "megatron_lengen": __version__,
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def measure_once(
    output: str,
    settings: dict[str, Any],
    force: bool,
    measure: Callable[[Path], dict[str, Any]],
    draw: Callable[[dict[str, Any], Path], None],
) -> dict[str, Any]:
    """Results from `output` if they are of these settings, else measured, drawn and written.

    Args:
        measure: gets the output folder, returns the numbers.
        draw: gets the results and the picture's path (the task's name, .png).

    Raises:
        BadInput: as `finished_results` and `prepare_output`.
    """
    found = finished_results(output, settings, force)
    if found is not None:
        print(f"{output} already has these results:")
        return found
    made = [path for path in (Path(output), *Path(output).parents) if not path.exists()]
    folder = prepare_output(output)
    try:
        found = {"settings": settings, **measure(folder), "versions": versions()}
        draw(found, folder / f"{settings['task']}.png")
        write_results(folder, found)
    except BaseException:
        with contextlib.suppress(OSError):  # folders that hold something stay
            for path in made:
                path.rmdir()
        raise
    return found


def finished_results(output: str, settings: dict[str, Any], force: bool) -> dict[str, Any] | None:
    """Results that are already in `output`, if they are of the same settings.

    Raises:
        BadInput: if there are results of other settings (naming what differs) and no `force`.
    """
    if force or not (Path(output) / RESULTS_NAME).exists():
        return None
    results = read_results(Path(output) / RESULTS_NAME)
    stored, asked = results.get("settings", {}), json.loads(json.dumps(settings))
    if stored == asked:
        return results
    differ = sorted(k for k in {*stored, *asked} if stored.get(k) != asked.get(k))
    raise BadInput(
        f"--output: {output} has results of other settings ({', '.join(differ)} differ); "
        "choose another folder or give --force"
    )


def read_results(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        BadInput: if the file cannot be read or is something else.
    """
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(results, dict):
        raise BadInput(f"{path}: found a {type(results).__name__}; allowed: a JSON object")
    return results


def prepare_output(output: str) -> Path:
    """The output folder, made if need be.

    Raises:
        BadInput: if it cannot be made or written to.
    """
    folder = Path(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--output: {output} cannot be made ({error.strerror})") from error
    if not os.access(folder, os.W_OK):
        raise BadInput(f"--output: {output} cannot be written to")
    return folder


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that readers see the old content or the new, nothing between."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def write_results(folder: Path, results: dict[str, Any]) -> None:
    """Write results.json; NaN and infinities are refused, since JSON has none."""
    write_atomically(folder / RESULTS_NAME, json.dumps(results, indent=2, allow_nan=False) + "\n")


def load_pyplot() -> Any:
    """matplotlib's pyplot, drawing to files only.

    Raises:
        BadInput: if matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise missing_package("matplotlib", "drawing the results") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
