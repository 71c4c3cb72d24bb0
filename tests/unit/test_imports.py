"""The tree is the architecture: imports point down, heavy packages stay in their rooms."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "megatron_lengen"

# What each room may import besides itself: the whole of "imports point down only".
CHECKS = {"config_checks", "attention_checks", "fp8_checks", "mamba_config"}
GROUND = CHECKS | {"config", "config_fields", "compat", "errors"}
BELOW_MODELS = GROUND | {"runtime", "data"}
MAY_IMPORT = {
    "errors": set(),
    "compat": {"errors"},
    # The configuration checks names against the registry of variants.
    "config": CHECKS | {"compat", "errors", "ops", "config_fields"},
    "config_fields": set(),
    "mamba_config": {"errors", "config"},
    "config_checks": {"compat", "errors", "ops", "config", "mamba_config"},
    "attention_checks": {"errors", "config", "config_checks"},
    "fp8_checks": {"errors", "config"},
    "ops": {"errors", "compat"},
    "runtime": GROUND,
    "data": GROUND | {"runtime"},
    "layers": GROUND | {"ops", "runtime"},
    "models": GROUND | {"ops", "runtime", "layers"},
    "checkpoint_folder": GROUND | {"data"},
    "generation": BELOW_MODELS | {"ops", "layers", "models", "checkpoint_folder"},
    "convert": BELOW_MODELS | {"ops", "layers", "models", "checkpoint_folder"},
    "evaluation": BELOW_MODELS
    | {"ops", "layers", "models", "checkpoint_folder", "convert", "generation"},
    # The events of the training loop may evaluate and average.
    "training": BELOW_MODELS
    | {"ops", "layers", "models", "checkpoint_folder", "evaluation", "convert"},
    "sizing": GROUND | {"ops", "training"},
}
# Packages that only some rooms may name.
ROOMS_OF = {
    "megatron": set(MAY_IMPORT) - {"ops", "errors"},
    "transformers": {"convert", "evaluation", "data"},
    "transformer_engine": {"layers", "models"},
}
MODULES = sorted((ROOT / PACKAGE).rglob("*.py"))
# Code that travels with exported models: it stands alone, and whoever loads it has transformers.
TRAVELS = ROOT / PACKAGE / "convert" / "modeling_lengen.py"


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    return parts[0]


def imports_of(path: Path) -> Iterator[tuple[str, bool]]:
    """Full names of what a file imports, and whether that happens when it is imported."""
    tree = ast.parse(path.read_text(), str(path))
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        at_import = id(node) not in inside
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from ((f"{node.module}.{alias.name}", at_import) for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path):
    room = room_of(path)
    if room == "__init__":
        allowed = {"compat"}
    else:
        assert room in MAY_IMPORT, f"{room} has no place in the architecture"
        allowed = MAY_IMPORT[room] | {room}
    for name, _ in imports_of(path):
        parts = name.split(".")
        if parts[0] == PACKAGE and name != f"{PACKAGE}.__version__":
            assert parts[1] in allowed, f"{room} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_heavy_packages_stay_in_their_rooms(path):
    for name, at_import in imports_of(path):
        package = name.split(".")[0]
        if package in ROOMS_OF:
            assert room_of(path) in ROOMS_OF[package], f"{path} imports {name}"
        if package == "transformers":
            assert not at_import or path == TRAVELS, (
                f"{path} imports transformers before it is needed"
            )
            # Of the data room only the tokenizers may.
            assert room_of(path) != "data" or "token" in path.name or "sentencepiece" in path.name


def test_what_travels_needs_torch_and_transformers_only():
    packages = {name.split(".")[0] for name, _ in imports_of(TRAVELS)}
    assert packages - set(sys.stdlib_module_names) == {"torch", "transformers"}


@pytest.mark.parametrize(
    "module, absent",
    [
        ("megatron_lengen.errors", ["torch", "megatron.core", "transformers"]),
        (
            "megatron_lengen.ops.rmsnorm, megatron_lengen.ops.attention",
            ["megatron.core", "transformers", "triton"],
        ),
        ("megatron_lengen.models.build", ["transformers"]),
    ],
)
def test_light_modules_load_nothing_heavy(module, absent):
    program = (
        f"import sys, {module}; print([n for n in {absent!r} if sys.modules.get(n) is not None])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_nothing_runs_at_import():
    """Module bodies hold definitions, constants and guarded entry points."""
    allowed = (
        ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign,
        ast.AsyncFunctionDef,
    )  # fmt: skip
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            guard = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            first = path.name == "__init__.py" and path.parent.name == PACKAGE
            assert isinstance(node, allowed) or text or guard or first, (
                f"{path}:{node.lineno}: {ast.unparse(node)[:60]}"
            )
