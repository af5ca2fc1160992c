# shellcheck shell=bash
# To be sourced by launch_node.sh, launch_cluster.sh and launch_replicas.sh: flags, interpreter, environment, command.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/env.sh
source "$root/scripts/env.sh"

DIES=16 # of a 910C node: 8 packages of 2, each a device of its own

# ---- flags -----------------------------------------------------------------------------------------------------------

# Name -> value. A script adds its own before parse_flags; scripts/preflight.py takes all of them by the same names.
# HCCL and the engine must give up on a rank at the same time, so one value, whoever sets it, is both timeouts.
declare -A flag=(
    [model]="" [lora-path]="" [device]=npu [tp]=4 [host]=127.0.0.1 [port]=8000 [master-port]=29500 [max-restarts]=3
    [timeout]=${HCCL_EXEC_TIMEOUT:-60}
)
server_flags=() # what follows --
dry_run=

flags_help() {
    cat <<END
flags (default):
  --model DIR          Hugging Face directory of a Dream model (the bundled one)
  --lora-path DIR      PEFT LoRA adapter, merged into the weights at start
  --device npu|cpu     where the model runs ($(default device)); cpu runs the same thing on any machine, on gloo
  --tp N               tensor parallel size: ranks that split each forward pass ($(default tp))
  --bp N               branch parallel size: groups of --tp ranks that take different branches ($(default bp))
  --host ADDRESS       address of the HTTP server ($(default host)); 0.0.0.0 serves other machines, so set LOPA_API_KEY too
  --port N             port of the HTTP server ($(default port))
  --master-port N      port on which the ranks find one another ($(default master-port))
  --timeout SECONDS    how long a rank may hang before all end; also HCCL_EXEC_TIMEOUT, which may set it (60)
  --max-restarts N     how often torchrun starts all ranks again after one has ended ($(default max-restarts))
  --dry-run            check the arguments and print what would run; start nothing
  --help               this
END
}

default() { echo "${flag[$1]}"; }

refuse() {
    echo "${0##*/}: $1; see --help" >&2
    exit 2
}

# parse_flags "$@": fills `flag`, `server_flags` and `dry_run`. The script defines `usage`.
parse_flags() {
    local name help
    help=$(usage) # with the defaults, which flags replace
    while (($#)); do
        case $1 in
            --help | -h) echo "$help" && exit ;;
            --dry-run) dry_run=1 && shift ;;
            --) shift && server_flags=("$@") && break ;;
            --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;&
            --*)
                name=${1#--}
                [[ -n ${flag[$name]+known} ]] || refuse "unknown flag $1 (the server's own go after --)"
                [[ -n ${2-} ]] || refuse "$1 needs a value"
                flag[$name]=$2
                shift 2
                ;;
            *) refuse "unexpected $1" ;;
        esac
    done
    for name in "${server_flags[@]}"; do
        case ${name%%=*} in
            --model | --lora-path | --device | --host | --port) refuse "${name%%=*} goes before --" ;;
            --tensor-parallel-size) refuse "$name after --: it is --tp here" ;;
            --branch-parallel-size) refuse "$name after --: it is --bp here" ;;
            --distributed-timeout-seconds) refuse "$name after --: it is --timeout here" ;;
        esac
    done
}

# ---- interpreter and pre-flight --------------------------------------------------------------------------------------

# Sets `python`: PYTHON (python3 if unset) where torch and this project are installed in it. Otherwise, on a CPU, that of
# .venv, set up first. For NPUs no environment is ever made, for torch_npu must come from where CANN does.
choose_python() {
    python=$(command -v "${PYTHON:-python3}") || refuse "there is no ${PYTHON:-python3}; name another one by PYTHON"
    [[ $python == /* ]] || python=$PWD/$python
    local installed='from importlib.metadata import version; version("torch"); version("lopa-dist-ascend")'
    # From / because a checkout in the current directory would pass for an installation.
    if [[ ${flag[device]} != cpu ]] || (cd / && "$python" -c "$installed") 2>/dev/null; then
        return
    fi
    [[ -n $dry_run ]] || use_env "$root"
    checker=$python python=$root/.venv/bin/python
}

# Checks `flag`, and the machine as well unless this is a dry run; exits on a failure. Sets `ranks`, those of one server on
# this node.
preflight() {
    local name arguments=()
    for name in "${!flag[@]}"; do
        [[ -z ${flag[$name]} ]] || arguments+=("--$name=${flag[$name]}")
    done
    "${checker:-$python}" "$root/scripts/preflight.py" ${dry_run:+--arguments-only} "${arguments[@]}" >&2 || exit
    ranks=$((flag[tp] * flag[bp] / ${flag[nnodes]:-1}))
}

# ---- environment: docs/deploy.md has this table ----------------------------------------------------------------------

# setting NAME VALUE: NAME=VALUE into `environment`; a value that the user has set, even an empty one, wins.
setting() { environment+=("$1=${!1-$2}"); }

# make_environment DIES [SERVER]: sets `environment` for the ranks of one server, the SERVER-th of this node from 0, on
# these dies ("0,1,2,3").
make_environment() {
    environment=()
    if [[ ${flag[device]} == cpu ]]; then
        cpu_environment
    else
        npu_environment "$1" "${2:-0}"
    fi
    # Control messages go over gloo on every device. It would take the address that the host's name has, if any.
    setting GLOO_SOCKET_IFNAME "${flag[interface]:-lo}"
}

cpu_environment() {
    local threads
    threads=$(($(nproc) / (ranks * ${flag[replicas]:-1})))
    # The ranks share the cores; without a value torchrun sets 1 and warns.
    setting OMP_NUM_THREADS $((threads > 0 ? threads : 1))
    # Where the torch_npu wheel lies beside torch, `import torch` needs CANN unless this is off.
    setting TORCH_DEVICE_BACKEND_AUTOLOAD 0
}

npu_environment() {
    local library
    # Rank i of this node runs on the i-th of these, so neighbours in a TP group are the two dies of a package.
    environment+=("ASCEND_RT_VISIBLE_DEVICES=$1")
    # Collectives run on the vector cores: the least latency for small messages, and graphs capture them.
    setting HCCL_OP_EXPANSION_MODE AIV
    # MB, HCCL's default: a communicator takes twice this from a die's memory, and a step's messages are smaller.
    setting HCCL_BUFFSIZE 200
    # Seconds until ranks have connected: the least that HCCL allows.
    setting HCCL_CONNECT_TIMEOUT 120
    # Seconds in a collective: those after which the engine gives a silent rank up, so that nothing outlives it.
    environment+=("HCCL_EXEC_TIMEOUT=${flag[timeout]}")
    # The first of the 32 ports that HCCL takes on the host: each server of a node needs its own.
    environment+=("HCCL_IF_BASE_PORT=$((${HCCL_IF_BASE_PORT:-60000} + 32 * $2))")
    if [[ -n ${flag[interface]:-} ]]; then
        # The network between the nodes; with = it is this interface, without all whose names begin so.
        setting HCCL_SOCKET_IFNAME "=${flag[interface]}"
    fi
    # Kernels are launched from a second thread; 2 moves more there, for more device memory at the peak.
    setting TASK_QUEUE_ENABLE 1
    # Operator compilation is set up when first needed: a faster start.
    setting ACL_OP_INIT_MODE 1
    # The allocator's segments grow in place, so buckets of many sizes do not break memory up. torch_npu refuses both names.
    [[ -v PYTORCH_ALLOC_CONF ]] || setting PYTORCH_NPU_ALLOC_CONF expandable_segments:True
    # 1 gives each die a share of the cores. It splits all cores among the visible dies, so with a part of a node's
    # dies two servers would be put on the same cores: then 0, the kernel's choice.
    setting CPU_AFFINITY_CONF $((ranks == DIES ? 1 : 0))
    # The host only launches kernels; OpenMP threads of 16 ranks would fight for cores, bound ones for the same.
    setting OMP_NUM_THREADS 1
    setting OMP_PROC_BIND false
    # Fewer page faults on the host's side of every step; only where it is installed.
    for library in "/usr/lib/$(uname -m)-linux-gnu/libjemalloc.so.2" /usr/lib64/libjemalloc.so.2; do
        [[ ! -e $library ]] || { setting LD_PRELOAD "$library" && break; }
    done
}

# ---- command ---------------------------------------------------------------------------------------------------------

# make_command PORT MASTER_PORT [TORCHRUN_FLAG ...]: sets `command` for the `ranks` of this node.
make_command() {
    command=(
        "$python" -m torch.distributed.run "${@:3}" --master-port "$2" --nproc-per-node "$ranks"
        --max-restarts "${flag[max-restarts]}" -m lopa_ascend.serve --device "${flag[device]}"
        --tensor-parallel-size "${flag[tp]}" --branch-parallel-size "${flag[bp]}"
        --distributed-timeout-seconds "${flag[timeout]}" --host "${flag[host]}" --port "$1"
    )
    [[ -z ${flag[model]} ]] || command+=(--model "${flag[model]}")
    [[ -z ${flag[lora-path]} ]] || command+=(--lora-path "${flag[lora-path]}")
    command+=("${server_flags[@]}")
}

# Prints `environment` and `command` as one command for a shell, followed by $1.
show() {
    local word
    printf env
    for word in "${environment[@]}" "${command[@]}"; do
        # A new line for the first word and for each flag.
        [[ $word == *=* || $word == -* || $word == "$python" ]] && printf ' \\\n   '
        # %q would also quote commas.
        [[ $word =~ ^[[:alnum:]_=,.:/+@%-]+$ ]] && printf ' %s' "$word" || printf ' %q' "$word"
    done
    printf '%s\n' "${1:-}"
}
