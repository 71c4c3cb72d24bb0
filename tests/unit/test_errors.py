"""Bad input becomes one line on rank 0 and exit code 2; anything else stays a fault."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_lengen.errors import BadInput, missing_package, require, run_main


def refuse() -> int:
    raise BadInput("--flag: found 3; allowed: 1 or 2")


@pytest.mark.parametrize("rank, said", [(None, True), ("0", True), ("1", False)])
def test_bad_input_is_one_line_of_the_first_rank(monkeypatch, capsys, rank, said):
    if rank is None:
        monkeypatch.delenv("RANK", raising=False)
    else:
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as left:
        run_main(refuse)
    assert left.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == ("error: --flag: found 3; allowed: 1 or 2\n" if said else "")


@pytest.mark.parametrize("result, code", [(None, 0), (0, 0), (3, 3)])
def test_the_result_of_main_is_the_exit_code(result, code):
    with pytest.raises(SystemExit) as left:
        run_main(lambda: result)
    assert left.value.code == code


def test_faults_are_not_disguised_as_bad_input():
    with pytest.raises(ZeroDivisionError):
        run_main(lambda: 1 // 0)
    with pytest.raises(ValueError, match="a fault"):
        run_main(lambda: int("a fault"))


def test_the_process_leaves_with_the_code():
    program = (
        "from megatron_lengen.errors import run_main, BadInput\n"
        "def main(): raise BadInput('--x: found y')\n"
        "run_main(main)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: --x: found y\n")


def test_require_speaks_only_when_needed():
    require(True, "unsaid")
    with pytest.raises(BadInput, match="said"):
        require(False, "said")


def test_bad_input_can_be_caught_as_a_value_error():
    assert issubclass(BadInput, ValueError)


def test_missing_package_names_the_command():
    assert (
        str(missing_package("nltk", "--task essay")) == "--task essay needs nltk: pip install nltk"
    )
    assert "pip install 'a[b]'" in str(missing_package("a", "this", "'a[b]'"))
