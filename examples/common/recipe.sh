# shellcheck shell=bash
# Sourced by the recipes: small steps that are skipped where their result is there already, so that
# an interrupted recipe, started again, goes on where it was.
#   DRY_RUN=1   print the commands and run nothing

COMMON_DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$COMMON_DIR/environment.sh"
source "$COMMON_DIR/layout.sh"

# headline TEXT: what comes next, with the time since the recipe started.
headline() {
    printf '\n== [%d:%02d] %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$*"
}

# run COMMAND...: print a command, and run it unless DRY_RUN=1.
run() {
    printf '+'
    printf ' %q' "$@"
    printf '\n'
    [ "${DRY_RUN:-0}" = 1 ] || "$@"
}

# python_tool SCRIPT ARGS...: run a script of this repository.
python_tool() {
    run "$PYTHON" "$LENGEN_ROOT/$1" "${@:2}"
}

# train ARGS...: pretrain_gpt.py, or what TRAIN_SCRIPT names, on the processes that the environment
# describes (see launch.sh).
train() {
    local script="${TRAIN_SCRIPT:-pretrain_gpt.py}"
    if [ "${DRY_RUN:-0}" = 1 ]; then
        printf '+ bash examples/common/launch.sh %s' "$script"
        printf ' %q' "$@"
        printf '\n'
    else
        bash "$COMMON_DIR/launch.sh" "$LENGEN_ROOT/$script" "$@" &
        finish $!
    fi
}

# finish PID...: wait for runs. A signal lets them save, and ends the recipe instead of going on.
finish() {
    local runs=("$@") run code failed=0 interrupted stopped=""
    trap 'interrupted=1; kill -TERM "${runs[@]}" 2>/dev/null || true' TERM INT USR1
    for run in "$@"; do
        while true; do
            interrupted=""
            wait "$run" && code=0 || code=$?
            [ -n "$interrupted" ] || break
            stopped=1
        done
        ((code == 0)) || failed=$code
    done
    trap - TERM INT USR1
    [ -n "$stopped" ] || return "$failed"
    echo "stopped by a signal; started again, this recipe goes on here" >&2
    exit "$failed"
}

# has_checkpoint FOLDER: whether a run can continue there.
has_checkpoint() {
    [ -s "$1/latest_checkpointed_iteration.txt" ]
}

# is_finished FOLDER ITERATIONS: whether a run has saved its last iteration.
is_finished() {
    [ "$(cat "$1/latest_checkpointed_iteration.txt" 2>/dev/null)" = "$2" ]
}

# main_node: whether this is where things are done that are done once (data, conversion,
# evaluation).
main_node() {
    local node
    node="$(node_rank)"
    if one_task_a_process; then node="$SLURM_PROCID"; fi
    [ "${node:-0}" = 0 ]
}

# fast_bf16: whether this machine multiplies bf16 matrices much faster than fp32 ones.
fast_bf16() {
    grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo 2>/dev/null
}
