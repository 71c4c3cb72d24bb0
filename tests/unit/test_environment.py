"""The set-up of a fresh machine, with stand-ins for Python and pip that write down their calls."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = "bash cat chmod cksum dirname flock head mkdir rm tr"

# An interpreter: HAS lists what it finds, as files beside it would; VERSION, VENV, PIP_WORKS are
# its state. `-m venv` copies it, `-m pip install` lets the copy find everything.
FAKE_PYTHON = """#!/bin/bash
here="$(dirname "$0")"
case "$*" in
"- "*) [ "${OLD:-0}" != 1 ] && [ -e "$here/has-$2" ] ;;
"--version") echo "Python 3.9.1" ;;
"-c "*version_info*) [ "${OLD:-0}" != 1 ] ;;
"-c import venv, ensurepip") [ "${NO_VENV:-0}" != 1 ] ;;
"-c "*) true ;;
"-m venv "*)
    echo "venv" >>"$CALLS"
    mkdir -p "$3/bin" "$3/lib"
    cat "$0" >"$3/bin/python"
    chmod +x "$3/bin/python"
    [ "${CUT_VENV:-0}" != 1 ] && echo >"$3/bin/pip" ;;
"-m pip --version") [ -e "$here/pip" ] ;;
"-m pip install "*)
    echo "pip install $(cat "${@: -1}" | head -n 1)" >>"$CALLS"
    [ "${CUT_PIP:-0}" != 1 ] || exit 1
    case "$*" in *test.txt) echo >"$here/has-test" ;; esac
    echo >"$here/has-base" ;;
*) echo "unknown call: $*" >>"$CALLS"; exit 9 ;;
esac
"""
BASE, TEST = "pip install base needs", "pip install test needs"


class Machine:
    """A repository in a folder with a space, and a PATH with little more than a python3."""

    def __init__(self, folder: Path):
        self.root = folder / "my project"
        self.bin = folder / "bin"
        self.calls = folder / "calls"
        (self.root / "examples/common").mkdir(parents=True)
        shutil.copy(ROOT / "examples/common/environment.sh", self.root / "examples/common")
        (self.root / "requirements").mkdir()
        (self.root / "requirements/base.txt").write_text("base needs\n")
        (self.root / "requirements/test.txt").write_text("test needs\n")
        (self.root / "requirements/deepspeed.txt").write_text("deepspeed\n")
        self.bin.mkdir()
        for name in PROGRAMS.split():
            if program := shutil.which(name):
                (self.bin / name).symlink_to(program)
        (self.bin / "python3").write_text(FAKE_PYTHON)
        (self.bin / "python3").chmod(0o755)

    def set_up(self, wanted: str = "base", **variables: object) -> tuple[int, str, list[str]]:
        """Exit code, the PYTHON that was chosen or the error, and the calls that were made."""
        self.calls.write_text("")
        program = (
            'source "$1/examples/common/environment.sh"; lengen_setup "$2" || exit; '
            'echo "$PYTHON"; [[ ":$PYTHONPATH:" == *":$1:"* ]]'
        )
        done = subprocess.run(
            ["bash", "-uc", program, "bash", self.root, wanted],
            cwd="/",
            env={"PATH": str(self.bin), "CALLS": str(self.calls)}
            | {name: str(value) for name, value in variables.items()},
            capture_output=True,
            text=True,
        )
        said = done.stdout if done.returncode == 0 else done.stderr
        return done.returncode, said.strip(), self.calls.read_text().splitlines()

    @property
    def venv_python(self) -> str:
        return str(self.root / ".venv/bin/python")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_fresh_machine_gets_an_environment_once(machine):
    assert machine.set_up() == (0, machine.venv_python, ["venv", BASE])
    assert machine.set_up() == (0, machine.venv_python, [])


def test_tests_need_more_than_examples_and_serve_both(machine):
    machine.set_up()
    assert machine.set_up("test") == (0, machine.venv_python, [TEST])
    assert machine.set_up("test") == (0, machine.venv_python, [])
    assert machine.set_up("base") == (0, machine.venv_python, [])


def test_changed_requirements_are_installed(machine):
    machine.set_up()
    (machine.root / "requirements/base.txt").write_text("base needs, other versions\n")
    assert machine.set_up()[2] == [BASE + ", other versions"]
    assert machine.set_up()[2] == []


@pytest.mark.parametrize("needs", ["base", "test"])
def test_a_prepared_environment_is_left_alone(machine, needs):
    (machine.bin / f"has-{needs}").touch()
    assert machine.set_up(needs) == (0, "python3", [])
    assert not (machine.root / ".venv").exists()


def test_no_setup_asks_nothing(machine):
    assert machine.set_up(LENGEN_NO_SETUP=1, OLD=1) == (0, "python3", [])
    assert machine.set_up(LENGEN_NO_SETUP=1, PYTHON="/other") == (0, "/other", [])
    assert not (machine.root / ".venv").exists()


def test_the_chosen_interpreter_is_asked_first(machine):
    other = machine.bin.parent / "container"
    other.mkdir()
    shutil.copy(machine.bin / "python3", other / "python")
    (other / "has-base").touch()
    assert machine.set_up(PYTHON=other / "python") == (0, str(other / "python"), [])


@pytest.mark.parametrize(
    "cut, calls", [("CUT_VENV", ["venv", BASE]), ("CUT_PIP", [BASE])], ids=["venv", "pip"]
)
def test_an_interrupted_installation_is_taken_up_again(machine, cut, calls):
    code, said, _ = machine.set_up(**{cut: 1})
    assert code == 1
    assert "did not finish; the next call takes it up again" in said.splitlines()[-1]
    assert machine.set_up() == (0, machine.venv_python, calls)
    assert machine.set_up()[2] == []


def test_a_package_that_was_cut_off_is_not_taken_for_whole(machine):
    machine.set_up(CUT_PIP=1)
    packages = machine.root / ".venv/lib/python3.11/site-packages"
    for name, files in (("half", ["METADATA"]), ("whole", ["METADATA", "RECORD"])):
        (packages / f"{name}-1.dist-info").mkdir(parents=True)
        for file in files:
            (packages / f"{name}-1.dist-info" / file).touch()
    machine.set_up()
    assert [path.name for path in packages.iterdir()] == ["whole-1.dist-info"]


def test_an_environment_made_by_hand_is_used_if_it_has_what_is_needed(machine):
    venv = machine.root / ".venv/bin"
    venv.mkdir(parents=True)
    shutil.copy(machine.bin / "python3", venv / "python")
    for name in ("pip", "has-base"):
        (venv / name).touch()
    assert machine.set_up() == (0, machine.venv_python, [])
    assert machine.set_up("test") == (0, machine.venv_python, [TEST])


def test_an_environment_whose_interpreter_is_gone_is_made_anew(machine):
    machine.set_up()
    (machine.root / ".venv/pyvenv.cfg").touch()
    os.remove(machine.venv_python)
    os.symlink("/nowhere/python3", machine.venv_python)
    assert machine.set_up() == (0, machine.venv_python, ["venv", BASE])


@pytest.mark.parametrize(
    "variables, said",
    [
        ({"OLD": 1}, "error: python3: found Python 3.9.1; allowed: Python 3.11 or newer"),
        ({"NO_VENV": 1}, "error: python3 has no venv or pip: install them"),
        ({"PYTHON": "/none/python"}, "error: /none/python: found "),
    ],
)
def test_what_is_missing_is_one_line(machine, variables, said):
    code, line, calls = machine.set_up(**variables)
    assert (code, calls) == (1, [])
    assert line.startswith(said) and "\n" not in line
    assert not (machine.root / ".venv").exists()


def test_an_old_python3_beside_a_newer_one(machine):
    old = machine.bin / "python3"
    (machine.bin / "python3.12").write_bytes(old.read_bytes())
    (machine.bin / "python3.12").chmod(0o755)
    old.write_text("#!/bin/bash\nexit 1\n")
    assert machine.set_up() == (0, machine.venv_python, ["venv", BASE])


def test_two_calls_at_once_install_once(machine):
    if not shutil.which("flock"):
        pytest.skip("needs flock")
    machine.calls.touch()
    program = f'source "{machine.root}/examples/common/environment.sh"; lengen_setup'
    variables = {"PATH": str(machine.bin), "CALLS": str(machine.calls)}
    running = [subprocess.Popen(["bash", "-c", program], env=variables) for _ in range(4)]
    assert [process.wait(30) for process in running] == [0] * 4
    assert machine.calls.read_text().splitlines() == ["venv", BASE]


def test_the_list_of_needs_is_met_where_the_tests_run():
    """The real check, against the real interpreter and against one without packages."""
    program = f'source "{ROOT}/examples/common/environment.sh"; _lengen_has_needs "$1" "$2"'
    for needs in ("base", "test"):
        call = ["bash", "-c", program, "bash", sys.executable, needs]
        assert subprocess.run(call).returncode == 0
    isolated = 'exec "$REAL" -S "$@"'
    bare = ["bash", "-c", f"bare() {{ ({isolated}); }}; {program}", "bash", "bare", "base"]
    assert subprocess.run(bare, env={**os.environ, "REAL": sys.executable}).returncode != 0
