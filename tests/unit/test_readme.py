"""The README says what is true: every file with its role, flags that exist, links that lead."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from megatron_lengen.training.flags import all_flags

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()


def files_in_table() -> set[str]:
    """Full paths from the tables under `**Title** (`folder/`)`."""
    found, folder = set(), ""
    for line in TEXT.splitlines():
        title = re.match(r"\*\*.+\*\*(?: \(`(.+/)`\))?$", line)
        if title:
            folder = title[1] or ""
        row = re.match(r"\| `([\w./]+\.(?:py|sh|cpp|h))` \| \S", line)
        if row:
            found.add(folder + row[1])
    return found


def test_every_source_file_is_listed_with_its_role() -> None:
    parts = ("megatron_lengen", "tools", "examples")
    sources = {
        str(path.relative_to(ROOT))
        for part in parts
        for pattern in ("*.py", "*.sh", "*.cpp", "*.h")
        for path in (ROOT / part).rglob(pattern)
        if path.name != "__init__.py"
    }
    assert files_in_table() == sources | {"pretrain_gpt.py", "pretrain_mamba.py"}


def test_training_flags_exist() -> None:
    known = {flag.name for flag in all_flags()} | {"--help"}
    start = TEXT.index("## Training\n")
    training = TEXT[start : TEXT.index("## Hugging Face")]
    tools = set(re.findall(r"tools/\S+\.py[^`]*", training))
    own = set(re.findall(r"--[a-z][\w-]+", "".join(tools)))
    assert set(re.findall(r"--[a-z][\w-]+", training)) - own <= known


def test_links_lead_to_files() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", TEXT):
        assert (ROOT / target).exists(), target


def test_nothing_is_left_to_fill_in() -> None:
    assert "@@" not in TEXT


def test_its_commands_are_files() -> None:
    for script in re.findall(r"(?:bash|python) ((?:\w+/)*\w+\.(?:sh|py))", TEXT):
        assert (ROOT / script).exists(), script
    assert subprocess.run(["bash", "-n", ROOT / "tests" / "run.sh"]).returncode == 0
