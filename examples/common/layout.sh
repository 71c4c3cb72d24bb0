# shellcheck shell=bash
# Sourced by launch.sh: which processes run here, on which of how many machines, and where they
# meet, all read from the environment (the names are listed in launch.sh).

fail() {
    echo "error: $*" >&2
    exit 2
}

# check_number NAME VALUE LOW HIGH
check_number() {
    if ! [[ "$2" =~ ^(0|[1-9][0-9]{0,8})$ ]] || (($2 < $3 || $2 > $4)); then
        fail "$1: found ${2:-nothing}; allowed: $3 to $4"
    fi
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

# This machine's number, or nothing where the environment does not say. A pod's RANK counts only
# beside a WORLD_SIZE.
node_rank() {
    local pod=""
    [ -z "${WORLD_SIZE:-}" ] || pod="${RANK:-}"
    echo "${NODE_RANK:-${PET_NODE_RANK:-${pod:-${JOB_COMPLETION_INDEX:-${SLURM_NODEID:-}}}}}"
}

# Whether srun started one task for each process rather than one for each machine.
one_task_a_process() {
    ((${SLURM_STEP_NUM_TASKS:-1} > ${SLURM_STEP_NUM_NODES:-1}))
}

# Sets processes (here), nodes, total (processes), restarts, and what find_meeting sets.
find_layout() {
    local pods=""
    restarts="${MAX_RESTARTS:-${PET_MAX_RESTARTS:-0}}"
    check_number MAX_RESTARTS "$restarts" 0 10000
    [ -z "${RANK:-}" ] || pods="${WORLD_SIZE:-}"
    processes="${NPROC_PER_NODE:-${GPUS_PER_NODE:-${PET_NPROC_PER_NODE:-auto}}}"
    case "$processes" in auto | gpu) processes="$(count_gpus)" ;; esac
    check_number NPROC_PER_NODE "$processes" 1 4096
    nodes="${NNODES:-${PET_NNODES:-${pods:-${SLURM_STEP_NUM_NODES:-${SLURM_JOB_NUM_NODES:-1}}}}}"
    [ "${nodes%:*}" != "${nodes#*:}" ] || nodes="${nodes%:*}"
    check_number NNODES "$nodes" 1 65536
    # shellcheck disable=SC2034
    total=$((nodes * processes))
    find_meeting
}

# Sets node (this machine's number; empty where the machines find their order themselves), address
# and port of the meeting point, and patience (seconds to wait there for the others).
find_meeting() {
    local endpoint="${RDZV_ENDPOINT:-${PET_RDZV_ENDPOINT:-}}"
    node=0 address=localhost port="${MASTER_PORT:-${PET_MASTER_PORT:-}}"
    patience="${RDZV_TIMEOUT:-900}"
    check_number RDZV_TIMEOUT "$patience" 1 1000000
    if ((nodes == 1)); then
        port="${port:-0}"
    elif [ -n "$endpoint" ]; then
        node="" address="${endpoint%:*}" port="${endpoint##*:}"
        [ "$address" != "$endpoint" ] || port=29400
    else
        node="$(node_rank)"
        check_number NODE_RANK "$node" 0 $((nodes - 1))
        find_master
    fi
    check_number MASTER_PORT "$port" 0 65535
}

# Sets address and port from the first machine's.
find_master() {
    address="${MASTER_ADDR:-${PET_MASTER_ADDR:-}}"
    [ -n "$address" ] || address="$(first_host "${SLURM_STEP_NODELIST:-${SLURM_JOB_NODELIST:-}}")"
    [ -n "$address" ] || fail "MASTER_ADDR: not set; allowed: the first machine's name"
    port="${MASTER_PORT:-${PET_MASTER_PORT:-}}"
    # Jobs that share a machine get ports of their own.
    [ -n "$port" ] || [ -z "${SLURM_JOB_ID:-}" ] || port=$((20000 + SLURM_JOB_ID % 10000))
    port="${port:-29500}"
}
