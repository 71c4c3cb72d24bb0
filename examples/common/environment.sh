# shellcheck shell=bash
# Sourced by the examples and the tests: `lengen_setup` leaves a Python that runs the project in
# PYTHON, and the project on PYTHONPATH.
#
# Nothing is installed where the current python3 (a container, an active environment) has what is
# needed, or where LENGEN_NO_SETUP=1. Elsewhere .venv is made once from requirements/.
#   PYTHON           the interpreter to start from (default: python3)
#   LENGEN_VENV      where the environment goes (default: .venv in the repository)
#   LENGEN_NO_SETUP  1: use the interpreter as it is

LENGEN_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

# lengen_setup [base|test]: the requirements to meet.
lengen_setup() {
    local wanted="${1:-base}" venv="${LENGEN_VENV:-$LENGEN_ROOT/.venv}" python="${PYTHON:-python3}"
    export PYTHONPATH="$LENGEN_ROOT${PYTHONPATH:+:$PYTHONPATH}"
    if [ "${LENGEN_NO_SETUP:-0}" != 1 ] && ! _lengen_has_needs "$python" "$wanted"; then
        if ! _lengen_is_ready "$venv" "$wanted"; then
            _lengen_make "$venv" "$wanted" "$python" || return 1
        fi
        python="$venv/bin/python"
    fi
    export PYTHON="$python"
}

# Whether an interpreter is new enough and finds every package (without importing them).
_lengen_has_needs() {
    "$1" - "$2" 2>/dev/null <<'PYTHON'
import importlib.util
import sys

needs = (
    "torch numpy packaging psutil transformers tokenizers safetensors huggingface_hub "
    "sentencepiece pyarrow tqdm matplotlib megatron megatron.core"
).split()
needs += ["pytest"] if sys.argv[1] == "test" else []
sys.exit(sys.version_info < (3, 11) or None in map(importlib.util.find_spec, needs))
PYTHON
}

# Whether the environment holds what was asked for: its state says so, or somebody else made it.
_lengen_is_ready() {
    local venv="$1" wanted="$2" state
    [ -x "$venv/bin/python" ] && "$venv/bin/python" -c "" 2>/dev/null || return 1
    [ -e "$venv/.lengen" ] || { _lengen_has_needs "$venv/bin/python" "$wanted"; return; }
    read -r state <"$venv/.lengen"
    [ "$state" = "test $(_lengen_hash)" ] ||
        { [ "$wanted" = base ] && [ "$state" = "base $(_lengen_hash)" ]; }
}

_lengen_hash() {
    (cd "$LENGEN_ROOT/requirements" && cat base.txt deepspeed.txt test.txt) | cksum | tr ' ' -
}

# Makes, completes or updates the environment. One process at a time, also on a shared file system;
# the state is written last, so an interrupted installation is taken up again.
_lengen_make() {
    local venv="$1" wanted="$2" python
    python="$(_lengen_new_enough "$3")" || return 1
    mkdir -p "$venv" || return 1
    (
        if command -v flock >/dev/null; then
            flock 9
            _lengen_is_ready "$venv" "$wanted" && exit 0
        fi
        echo "setting up $venv (once; some minutes): requirements/$wanted.txt" >&2
        echo "incomplete" >"$venv/.lengen"
        if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
            # Cut off while it was made, or its interpreter is gone.
            [ ! -e "$venv/pyvenv.cfg" ] || rm -rf "${venv:?}"/{bin,lib,lib64}
            "$python" -m venv "$venv" >&2 || exit 1
        fi
        # A package whose installation was cut off has no RECORD: pip must not take it for whole.
        for package in "$venv"/lib/python*/site-packages/*.dist-info; do
            [ -e "$package/RECORD" ] || rm -rf "$package"
        done
        "$venv/bin/python" -m pip install --disable-pip-version-check \
            -r "$LENGEN_ROOT/requirements/$wanted.txt" >&2 || exit 1
        echo "$wanted $(_lengen_hash)" >"$venv/.lengen"
    ) 9>"$venv/.lock" || {
        echo "error: setting up $venv did not finish; the next call takes it up again" >&2
        return 1
    }
}

# Prints an interpreter that can make an environment, or says what is missing.
_lengen_new_enough() {
    local python
    for python in "$1" python3.11 python3.12 python3.13; do
        "$python" -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null || continue
        if ! "$python" -c "import venv, ensurepip" 2>/dev/null; then
            echo "error: $python has no venv or pip: install them (Debian: apt-get install" \
                "python3-venv), or install requirements/ yourself" >&2
            return 1
        fi
        echo "$python"
        return 0
    done
    echo "error: $1: found $("$1" --version 2>&1 | head -n 1); allowed: Python 3.11 or newer" \
        "(set PYTHON to one)" >&2
    return 1
}
