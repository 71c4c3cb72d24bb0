#!/usr/bin/env bash
# Runs a training script on this machine's GPUs, or on this machine's share of many machines:
#
#     bash examples/common/launch.sh pretrain_gpt.py [its arguments...]
#
# On several machines the same line runs once on each: under `srun --ntasks-per-node=1`, in every
# pod, or by hand. Where it runs is read from the environment; the first name found counts:
#   processes here   NPROC_PER_NODE, GPUS_PER_NODE, PET_NPROC_PER_NODE; else one for each GPU, or 1
#   machines         NNODES, PET_NNODES, a pod's WORLD_SIZE, SLURM_JOB_NUM_NODES; else 1
#   this machine     NODE_RANK, PET_NODE_RANK, a pod's RANK, JOB_COMPLETION_INDEX, SLURM_NODEID
#   meeting point    MASTER_ADDR, PET_MASTER_ADDR, the first of SLURM_JOB_NODELIST;
#                    MASTER_PORT, PET_MASTER_PORT, one made of SLURM_JOB_ID; else 29500
# DRY_RUN=1 prints the command and runs nothing. LOG_DIR=FOLDER keeps the output of each process.
#
# The arguments are checked in one process before torchrun starts, which would turn the exit code 2
# of bad input into 1. A signal goes to the training processes, which save and leave with 0.
set -uo pipefail

fail() {
    echo "error: $*" >&2
    exit 2
}

# check_number NAME VALUE LOW HIGH
check_number() {
    [[ "$2" =~ ^(0|[1-9][0-9]{0,8})$ ]] && (($2 >= $3 && $2 <= $4)) ||
        fail "$1: found ${2:-nothing}; allowed: $3 to $4"
}

count_gpus() {
    local gpus
    if command -v nvidia-smi >/dev/null; then
        gpus="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')"
    else
        gpus="$(find /dev -maxdepth 1 -name 'nvidia[0-9]*' 2>/dev/null | grep -c .)"
    fi
    if ((gpus > 0)) && [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        gpus="$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -cvE '^ *(-1)?$')"
    fi
    echo $((gpus > 0 ? gpus : 1))
}

# First name of a compressed list such as node[07-12,15],other3. Containers often lack scontrol.
first_host() {
    if command -v scontrol >/dev/null; then
        scontrol show hostnames "$1" | sed -n 1p
    else
        sed -E 's/^([^][,]*)(\[([0-9]*)[^]]*\])?([^][,]*).*/\1\3\4/' <<<"$1"
    fi
}

free_port() {
    "$PYTHON" -c "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])"
}

# Sets processes (here), nodes, node (this one's rank), address, port and total (processes).
find_layout() {
    local pods="" pod=""
    if [ -n "${RANK:-}" ] && [ -n "${WORLD_SIZE:-}" ]; then
        pods="$WORLD_SIZE" pod="$RANK"
    fi
    processes="${NPROC_PER_NODE:-${GPUS_PER_NODE:-${PET_NPROC_PER_NODE:-$(count_gpus)}}}"
    check_number NPROC_PER_NODE "$processes" 1 4096
    nodes="${NNODES:-${PET_NNODES:-${pods:-${SLURM_JOB_NUM_NODES:-1}}}}"
    check_number NNODES "$nodes" 1 65536
    total=$((nodes * processes))
    ((${SLURM_STEP_NUM_TASKS:-1} <= ${SLURM_STEP_NUM_NODES:-1})) ||
        fail "srun: found $SLURM_STEP_NUM_TASKS tasks; allowed: one on each machine" \
            "(--ntasks-per-node=1)"
    node=0 address=127.0.0.1 port="${MASTER_PORT:-${PET_MASTER_PORT:-}}"
    if ((nodes == 1)); then
        port="${port:-$(free_port)}"
    else
        node="${NODE_RANK:-${PET_NODE_RANK:-${pod:-${JOB_COMPLETION_INDEX:-${SLURM_NODEID:-}}}}}"
        check_number NODE_RANK "$node" 0 $((nodes - 1))
        address="${MASTER_ADDR:-${PET_MASTER_ADDR:-}}"
        [ -n "$address" ] || address="$(first_host "${SLURM_JOB_NODELIST:-}")"
        [ -n "$address" ] || fail "MASTER_ADDR: not set; allowed: the first machine's name"
        # Jobs that share a machine get ports of their own.
        [ -n "$port" ] || [ -z "${SLURM_JOB_ID:-}" ] || port=$((20000 + SLURM_JOB_ID % 10000))
        port="${port:-29500}"
    fi
    check_number MASTER_PORT "$port" 1 65535
}

# Sends a signal to the training processes. torchrun itself would kill them after 30 seconds.
forward() {
    local workers=""
    signalled=1
    while [ -z "${workers// /}" ] && kill -0 "$torchrun" 2>/dev/null; do
        workers="$(cat "/proc/$torchrun/task/"*/children 2>/dev/null || pgrep -P "$torchrun")"
        [ -n "${workers// /}" ] || sleep 0.2
    done
    # shellcheck disable=SC2086
    kill "-$1" $workers 2>/dev/null
}

# Runs torchrun in a process group of its own, so that a terminal's Ctrl-C comes here alone.
run_torchrun() {
    local code
    set -m
    "$@" &
    torchrun=$!
    trap 'forward TERM' TERM
    trap 'forward INT' INT
    while true; do
        signalled=""
        wait "$torchrun"
        code=$?
        [ -n "$signalled" ] || return "$code"
    done
}

# Speaks on the first machine only; the resolved configuration is not shown.
check_arguments() {
    local said code
    said="$(RANK=$((node * processes)) WORLD_SIZE="$total" \
        "$PYTHON" "$script" "$@" --dry-run 2>&1 >/dev/null)"
    code=$?
    if ((code != 0)); then
        [ -z "$said" ] || echo "$said" >&2
        exit "$code"
    fi
}

run_single() {
    unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT
    if [ -n "${LOG_DIR:-}" ]; then
        mkdir -p "$LOG_DIR" || fail "LOG_DIR: cannot write to $LOG_DIR"
        exec > >(tee "$LOG_DIR/stdout.log") 2> >(tee "$LOG_DIR/stderr.log" >&2)
    fi
    exec "$@"
}

(($# > 0)) || fail "launch.sh: no script given; use: launch.sh SCRIPT [ARGUMENTS...]"
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
script="$1"
shift
[ -f "$script" ] || [ ! -f "$LENGEN_ROOT/$script" ] || script="$LENGEN_ROOT/$script"
[ -f "$script" ] || fail "launch.sh: found no script $script"
PYTHON="${PYTHON:-python3}"
if [ "${DRY_RUN:-0}" != 1 ]; then
    lengen_setup || exit 1
fi

# One of the processes of a run that is being started already.
if [ -n "${RANK:-}" ] && [ -n "${WORLD_SIZE:-}" ] && [ -n "${LOCAL_RANK:-}" ]; then
    exec "$PYTHON" "$script" "$@"
fi

find_layout
command=("$PYTHON")
if ((total > 1)); then
    command+=(-m torch.distributed.run --nnodes "$nodes" --node-rank "$node"
        --nproc-per-node "$processes" --master-addr "$address" --master-port "$port")
    [ -z "${LOG_DIR:-}" ] || command+=(--log-dir "$LOG_DIR" --tee 3)
fi
command+=("$script" "$@")
if [ "${DRY_RUN:-0}" = 1 ]; then
    printf '%q' "${command[0]}"
    printf ' %q' "${command[@]:1}"
    echo
    exit 0
fi

((total > 1)) || run_single "${command[@]}"
for argument in "$@"; do
    case "$argument" in
    -h | --help | --dry-run)
        RANK=$((node * processes)) WORLD_SIZE="$total" exec "$PYTHON" "$script" "$@"
        ;;
    esac
done
check_arguments "$@"
if ((nodes > 1)) && [ -n "${SLURM_JOB_ID:-}" ] && [ -z "${SLURM_STEP_ID:-}" ]; then
    echo "note: not started by srun: waiting for the other machines" >&2
fi

cores="$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}"
# Megatron-Core overlaps tensor-parallel communication with this setting only.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
unset RANK WORLD_SIZE
run_torchrun "${command[@]}"
