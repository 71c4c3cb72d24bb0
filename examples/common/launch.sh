#!/usr/bin/env bash
# Runs a training script on this machine's GPUs, or on this machine's share of many machines:
#
#     bash examples/common/launch.sh pretrain_gpt.py [its arguments...]
#
# On several machines the same line runs once on each: under srun, in every pod, or by hand. All
# else is read from the environment; of several names the first that is set counts. Complete
# examples for every way: docs/launching.md.
#   processes here   NPROC_PER_NODE, GPUS_PER_NODE, PET_NPROC_PER_NODE; else one for each GPU, or 1
#   machines         NNODES, PET_NNODES, a pod's WORLD_SIZE, SLURM_STEP_NUM_NODES,
#                    SLURM_JOB_NUM_NODES; else 1
#   this machine     NODE_RANK, PET_NODE_RANK, a pod's RANK, JOB_COMPLETION_INDEX, SLURM_NODEID
#   meeting point    MASTER_ADDR, PET_MASTER_ADDR, the first of SLURM_STEP_NODELIST or
#                    SLURM_JOB_NODELIST; MASTER_PORT, PET_MASTER_PORT, one made of SLURM_JOB_ID;
#                    else 29500
#   rendezvous       RDZV_ENDPOINT=HOST[:PORT], PET_RDZV_ENDPOINT: the machines need no number; its
#                    name is RDZV_ID, PET_RDZV_ID, SLURM_JOB_ID; else "run"
#   patience         RDZV_TIMEOUT: seconds that the machines have to meet (900)
#   restarts         MAX_RESTARTS, PET_MAX_RESTARTS, or launch.sh --max-restarts N SCRIPT: how often
#                    in a row, without a newer checkpoint, a failed run starts again (0)
#   logs             LOG_DIR=FOLDER keeps the output of each process
#   threads          OMP_NUM_THREADS; else the cores shared out among the processes
#   interpreter      PYTHON, LENGEN_VENV, LENGEN_NO_SETUP (see environment.sh)
# CUDA_DEVICE_MAX_CONNECTIONS is 1 unless it is set. NCCL_*, GLOO_* and all other variables reach
# the processes as they are. DRY_RUN=1 prints the command and runs nothing. Under srun with one task
# for each process (--ntasks-per-node=8) every task is that process, without torchrun.
#
# Exit codes: 0 done, or saved after SIGTERM, SIGINT or SIGUSR1; 2 bad input, which the arguments are
# checked for before anything starts; else the code of the process that failed first.
set -uo pipefail

COMMON="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$COMMON/environment.sh"
source "$COMMON/layout.sh"

# Cores that this process may use.
cores() {
    nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1
}

# Sets command: one process, or srun's task as one of many.
plain_command() {
    command=("$PYTHON" "$script" "$@")
    if one_task_a_process; then
        [ "$restarts" = 0 ] || fail "MAX_RESTARTS: found $restarts with one task for each process;" \
            "allowed: 0, or one task on each machine (--ntasks-per-node=1)"
        [ "${NPROC_PER_NODE:-1}" = 1 ] || fail "srun: found $SLURM_STEP_NUM_TASKS tasks on" \
            "${SLURM_STEP_NUM_NODES:-1} machines with NPROC_PER_NODE=$NPROC_PER_NODE; allowed: one" \
            "task on each machine (--ntasks-per-node=1), or no NPROC_PER_NODE"
        find_master
        command=(env "RANK=$SLURM_PROCID" "WORLD_SIZE=$SLURM_STEP_NUM_TASKS"
            "LOCAL_RANK=$SLURM_LOCALID" "MASTER_ADDR=$address" "MASTER_PORT=$port"
            "OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
            "CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}" "${command[@]}")
    fi
}

# Sets command: torchrun with this machine's processes.
torchrun_command() {
    local cores settings=() flags=(--nnodes "$nodes" --nproc-per-node "$processes")
    local id="${RDZV_ID:-${PET_RDZV_ID:-${SLURM_JOB_ID:-run}}}"
    local meeting=(--rdzv-backend c10d --rdzv-endpoint "$address:$port" --rdzv-id "$id")
    if ((nodes == 1)); then
        flags+=("${meeting[@]}" --local-addr localhost)
    elif [ -z "$node" ]; then
        flags+=("${meeting[@]}" --rdzv-conf "join_timeout=$patience")
    elif ((restarts > 0)); then
        # Fixed numbers do not survive a machine that comes back.
        flags+=("${meeting[@]}" --rdzv-conf "join_timeout=$patience,is_host=$((node == 0))")
    else
        flags+=(--node-rank "$node" --master-addr "$address" --master-port "$port"
            --rdzv-conf "timeout=$patience")
    fi
    ((restarts == 0)) || flags+=(--max-restarts "$restarts")
    if [ -n "${LOG_DIR:-}" ]; then
        settings+=("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=[rank \${rank}]: ")
        ((nodes == 1)) || LOG_DIR+="/node-${node:-$(uname -n)}"
        flags+=(--log-dir "$LOG_DIR" --tee 3)
    fi
    cores="$(cores)"
    settings+=("OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}")
    # Megatron-Core overlaps tensor-parallel communication with this setting only.
    settings+=("CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}")
    command=(env "${settings[@]}" "$PYTHON" "$COMMON/torchrun.py" "${flags[@]}" "$script" "$@")
}

print_command() {
    printf '%q' "${command[0]}"
    printf ' %q' "${command[@]:1}"
    echo
}

# Every machine checks for itself, since data may lie on its own disk; the resolved configuration
# is not shown.
check_arguments() {
    local said code where=""
    said="$(RANK=0 WORLD_SIZE="$total" "$PYTHON" "$script" "$@" --dry-run 2>&1 >/dev/null)"
    code=$?
    ((code != 0)) || return 0
    [ "$node" = 0 ] || where=" (on $(uname -n))"
    [ -z "$said" ] || echo "$said$where" >&2
    exit "$code"
}

# Replaces this shell by the command. The file writers outlive a signal to the whole group, so that
# the process can still speak while it saves.
start() {
    unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT "${!PET_@}"
    if [ "${1:-}" != torchrun ] && [ -n "${LOG_DIR:-}" ]; then
        ! one_task_a_process || LOG_DIR+="/rank-$SLURM_PROCID"
        mkdir -p "$LOG_DIR" 2>/dev/null || fail "LOG_DIR: cannot write to $LOG_DIR"
        exec > >(trap '' TERM INT USR1; exec tee "$LOG_DIR/stdout.log") \
            2> >(trap '' TERM INT USR1; exec tee "$LOG_DIR/stderr.log" >&2)
    fi
    exec "${command[@]}"
}

case "${1:-}" in
--max-restarts)
    MAX_RESTARTS="${2:-}"
    shift $(($# < 2 ? 1 : 2))
    ;;
--max-restarts=*)
    MAX_RESTARTS="${1#*=}"
    shift
    ;;
esac
(($# > 0)) || fail "launch.sh: no script given; use: launch.sh SCRIPT [ARGUMENTS...]"
case "$1" in -*) fail "launch.sh: found $1; allowed: --max-restarts N, then a script" ;; esac
case "${DRY_RUN:-0}" in 0 | 1) ;; *) fail "DRY_RUN: found $DRY_RUN; allowed: 0 or 1" ;; esac
[ -z "${PYTHON:-}" ] || command -v "$PYTHON" >/dev/null || fail "PYTHON: found no program $PYTHON"
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
for name in OMP_NUM_THREADS CUDA_DEVICE_MAX_CONNECTIONS; do
    [ -z "${!name:-}" ] || check_number "$name" "${!name}" 1 4096
done
kind=plain
one_task_a_process || ((total == 1 && restarts == 0)) || kind=torchrun
"${kind}_command" "$@"
if [ "${DRY_RUN:-0}" = 1 ]; then
    print_command
    exit 0
fi
if [ "$kind" = torchrun ]; then
    for argument in "$@"; do
        case "$argument" in
        -h | --help | --dry-run)
            RANK=$((${node:-0} * processes)) WORLD_SIZE="$total" exec "$PYTHON" "$script" "$@"
            ;;
        esac
    done
    [ -z "${LOG_DIR:-}" ] || mkdir -p "$LOG_DIR" 2>/dev/null || fail "LOG_DIR: cannot write to $LOG_DIR"
    check_arguments "$@"
    if ((nodes > 1)) && [ -n "${SLURM_JOB_ID:-}" ] && [ -z "${SLURM_STEP_ID:-}" ]; then
        echo "note: not started by srun: waiting for the other machines" >&2
    fi
fi
start "$kind"
