# shellcheck shell=bash
# To be sourced by node.sh and cluster.sh: flags, interpreter, checks, environment of the ranks, and their command.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=scripts/env.sh
source "$root/scripts/env.sh"

DIES=16 # of a 910C node: 8 packages of 2, each a device of its own

# ---- flags -----------------------------------------------------------------------------------------------------------

# Name -> value. A script adds its own flags before parse_flags; `python -m scripts.launch` takes all by the same names.
# HCCL and the engine must give up a silent rank at the same time, so both timeouts are this value.
declare -A flag=(
    [model]="" [lora-path]="" [device]=npu [tp]=4 [host]=127.0.0.1 [port]=8000 [max-restarts]=3
    [timeout]=${HCCL_EXEC_TIMEOUT:-60}
)
program_flags=() # what follows --: of the server, or of the self-test
graph_mode= # the server's own --graph-mode, if program_flags has it
dry_run=
selftest= # not empty: the self-test runs, not a server
deterministic= # not empty: HCCL sums in the same order always

flags_help() {
    cat <<END
flags (default):
  --model MODEL        directory, or name on the hub, of a Dream or of a registered model (the bundled one)
  --lora-path ADAPTER  directory, or name on the hub, of a PEFT LoRA adapter, merged into the weights at start
  --device npu|cpu     what the model runs on ($(default device)); cpu runs the same on any machine, with gloo
  --tp N               tensor parallel size: ranks that split each forward pass ($(default tp))
  --bp N               branch parallel size: groups of --tp ranks that take different branches ($(default bp))
  --host ADDRESS       address of the HTTP server ($(default host)); 0.0.0.0 serves other machines, so set LOPA_API_KEY too
  --port N             port of the HTTP server ($(default port))
  --timeout SECONDS    how long a rank may hang before all end (HCCL_EXEC_TIMEOUT if it is set, else 60)
  --max-restarts N     how often a server is started again after it has failed ($(default max-restarts))
  --deterministic      sum in the same order always, so that a request has the same tokens in every run; slower on NPUs
                       for sums above 512 KiB (HCCL_DETERMINISTIC)
  --dry-run            check the arguments and print what would run, as shell commands; start nothing
  --help               print this
END
}

# default NAME: the value of a flag that was not given.
default() { echo "${flag[$1]}"; }

# refuse MESSAGE: ends the script because of a wrong flag.
refuse() {
    echo "${0##*/}: $1; see --help" >&2
    exit 2
}

# parse_flags "$@": fills `flag`, `program_flags`, `dry_run`, `selftest` and `deterministic`. The script defines `usage`.
parse_flags() {
    local name help
    help=$(usage) # before flags replace the defaults that it names
    while (($#)); do
        case $1 in
            --help | -h) echo "$help" && exit ;;
            --dry-run) dry_run=1 && shift ;;
            --selftest) selftest=1 && shift ;;
            --deterministic) deterministic=1 && shift ;;
            --replicas | --replicas=*) refuse "replicas are removed here: python -m lopa_ascend.serve --replicas N" ;;
            --) shift && program_flags=("$@") && break ;;
            --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;&
            --*)
                name=${1#--}
                [[ $name != master-port || ${flag[$name]+known} ]] ||
                    refuse "--master-port is a flag of cluster.sh; the ranks of one node choose a port themselves"
                [[ -n $name && -n ${flag[$name]+known} ]] || refuse "unknown flag $1 (the server's own go after --)"
                [[ -n ${2-} ]] || refuse "$1 needs a value"
                flag[$name]=$2
                shift 2
                ;;
            *) refuse "unexpected $1" ;;
        esac
    done
    local before=
    for name in "${program_flags[@]}"; do
        [[ $before != --graph-mode ]] || graph_mode=$name
        [[ $name != --graph-mode=* ]] || graph_mode=${name#*=}
        before=$name
        case ${name%%=*} in
            --model | --lora-path | --device | --host | --port) refuse "${name%%=*} goes before --" ;;
            --tensor-parallel-size) refuse "$name after --: it is --tp here" ;;
            --branch-parallel-size) refuse "$name after --: it is --bp here" ;;
            --distributed-timeout-seconds) refuse "$name after --: it is --timeout here" ;;
        esac
    done
    [[ -z $selftest || ${flag[device]} == npu ]] || refuse "--selftest tests NPUs, and --device is ${flag[device]}"
}

# ---- interpreter and checks ------------------------------------------------------------------------------------------

# Sets `python`, the interpreter of the ranks: PYTHON (python3 if unset) if torch and this project are installed in it.
# Otherwise, on a CPU, the interpreter of .venv, which is set up first; `checker` is then the one that makes the checks. For
# NPUs no environment is ever made, because torch_npu must fit the machine's CANN.
choose_python() {
    python=$(command -v "${PYTHON:-python3}") || refuse "there is no ${PYTHON:-python3}; name another one by PYTHON"
    [[ $python == /* ]] || python=$PWD/$python
    [[ $python$root != *=* ]] || refuse "$python, in $root: a path with = cannot be launched"
    local installed='from importlib.metadata import version; version("torch"); version("lopa-dist-ascend")'
    # From /, because a checkout in the current directory would count as an installation.
    if [[ ${flag[device]} != cpu ]] || (cd / && "$python" -c "$installed") 2>/dev/null; then
        return
    fi
    [[ -n $dry_run ]] || use_env "$root"
    checker=$python python=$root/.venv/bin/python
}

# Checks `flag`, and unless this is a dry run the machine too; exits if a check fails. Sets `ranks`, the number of ranks of
# one server on this node.
check_launch() {
    local name arguments=()
    for name in "${!flag[@]}"; do
        [[ -z ${flag[$name]} ]] || arguments+=("--$name=${flag[$name]}")
    done
    [[ ${flag[device]} == cpu || -z $graph_mode ]] || arguments+=("--graph-mode=$graph_mode")
    # The project may not be installed there, nor be the current directory.
    PYTHONPATH=$root "${checker:-$python}" "$root/scripts/launch/__main__.py" ${dry_run:+--arguments-only} \
        "${arguments[@]}" >&2 || exit
    ranks=$((flag[tp] * flag[bp] / ${flag[nnodes]:-1}))
}

# ---- environment: docs/deploy.md has this table ----------------------------------------------------------------------

# setting NAME VALUE: adds NAME=VALUE to `environment`; a value that the user has set, even an empty one, wins.
setting() { environment+=("$1=${!1-$2}"); }

# make_environment DIES: sets `environment` for the ranks of the server on these dies, as in "0,1,2,3".
make_environment() {
    environment=()
    if [[ ${flag[device]} == cpu ]]; then
        cpu_environment
    else
        npu_environment "$1"
    fi
    # Ranks find the self-test in this checkout; pip installs the engine without scripts/.
    [[ -z $selftest ]] || environment+=("PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}")
    # Control messages use gloo on every device. Without this it takes the address that the host's name has, if any.
    setting GLOO_SOCKET_IFNAME "${flag[interface]:-lo}"
}

cpu_environment() {
    local threads
    threads=$(($(nproc) / ranks))
    # The ranks share the cores.
    setting OMP_NUM_THREADS $((threads > 0 ? threads : 1))
    # With the torch_npu wheel installed, `import torch` needs CANN unless this is off.
    setting TORCH_DEVICE_BACKEND_AUTOLOAD 0
}

npu_environment() {
    local library
    # Rank i of this node runs on the i-th of these dies, so neighbours in a TP group are the two dies of a package.
    environment+=("ASCEND_RT_VISIBLE_DEVICES=$1")
    [[ -z $deterministic ]] || environment+=(HCCL_DETERMINISTIC=true)
    # Seconds until ranks have connected: the least that HCCL allows.
    setting HCCL_CONNECT_TIMEOUT 120
    # Seconds in a collective: the same after which the engine gives up a silent rank.
    environment+=("HCCL_EXEC_TIMEOUT=${flag[timeout]}")
    # The first of the 32 ports that HCCL takes on the host: each server of a node needs ports of its own.
    environment+=("HCCL_IF_BASE_PORT=${HCCL_IF_BASE_PORT:-60000}")
    if [[ -n ${flag[interface]:-} ]]; then
        # The network between the nodes. With "=" it is this interface; without, all whose names begin with this one.
        setting HCCL_SOCKET_IFNAME "=${flag[interface]}"
    fi
    # Kernels are launched from a second thread; with 2 torch_npu refuses to capture graphs.
    setting TASK_QUEUE_ENABLE 1
    # Operator compilation is set up when first needed: a faster start.
    setting ACL_OP_INIT_MODE 1
    # The allocator's segments grow in place, so buckets of many sizes do not fragment the memory. torch_npu refuses to have
    # both variables set.
    [[ -v PYTORCH_ALLOC_CONF ]] || setting PYTORCH_NPU_ALLOC_CONF expandable_segments:True
    # 1 gives each die a share of the cores. torch_npu splits all cores among the visible dies, so two servers on parts of a
    # node would get the same cores; there 0 leaves the choice to the operating system.
    setting CPU_AFFINITY_CONF $((ranks == DIES ? 1 : 0))
    # The host only launches kernels. OpenMP threads of 16 ranks would compete for cores; bound ones for the same cores.
    setting OMP_NUM_THREADS 1
    setting OMP_PROC_BIND false
    # jemalloc means fewer page faults on the host in every step; used only if it is installed.
    for library in "/usr/lib/$(uname -m)-linux-gnu/libjemalloc.so.2" /usr/lib64/libjemalloc.so.2; do
        [[ ! -e $library ]] || { setting LD_PRELOAD "$library" && break; }
    done
}

# ---- command ---------------------------------------------------------------------------------------------------------

# make_command PORT [TORCHRUN_FLAG ...]: sets `command`, which runs one server, or the self-test, with its `ranks` on this
# node. With flags of torchrun, torchrun starts the ranks; otherwise the server does.
make_command() {
    command=("$python")
    (($# == 1)) || command+=(-m torch.distributed.run "${@:2}" --nproc-per-node "$ranks")
    if [[ -n $selftest ]]; then
        command+=(-m scripts.selftest --tensor-parallel-size "${flag[tp]}")
    else
        command+=(
            -m lopa_ascend.serve --device "${flag[device]}"
            --tensor-parallel-size "${flag[tp]}" --branch-parallel-size "${flag[bp]}"
            --distributed-timeout-seconds "${flag[timeout]}" --host "${flag[host]}" --port "$1"
        )
        [[ -z ${flag[model]} ]] || command+=(--model "${flag[model]}")
        [[ -z ${flag[lora-path]} ]] || command+=(--lora-path "${flag[lora-path]}")
    fi
    command+=("${program_flags[@]}")
}

# become_command: runs `command` in place of this script, or prints it.
become_command() {
    [[ -z $dry_run ]] || { show && exit; }
    exec env "${environment[@]}" "${command[@]}"
}

# keep_serving: runs `command`, and again whenever it fails, --max-restarts times at most, until a signal ends it. Then this
# shell exits with the status of `command`.
keep_serving() {
    local left=${flag[max-restarts]} pid="" stopped="" status
    trap 'stop_server TERM' TERM HUP
    trap 'stop_server "${stopped:-TERM}"' INT # a second Ctrl-C does not wait for running requests
    while true; do
        # In a session of its own, so that Ctrl-C reaches it once, through the trap.
        setsid env "${environment[@]}" "${command[@]}" &
        pid=$!
        [[ -z $stopped ]] || kill -TERM "$pid" # the signal came before there was a pid
        wait "$pid" && status=0 || status=$?
        while kill -0 "$pid" 2>/dev/null; do # a signal has interrupted the wait
            wait "$pid" && status=0 || status=$?
        done
        if [[ -n $stopped ]]; then # the server may have ended before the interrupted wait could see its status
            wait "$pid" && status=0 || status=$?
            exit "$status"
        fi
        ((status && left-- > 0)) || exit "$status"
        echo "${0##*/}: the server on port ${flag[port]} has ended with status $status; starting it again" >&2
        pid=
        [[ ${flag[device]} == cpu ]] || check_launch # a die may have failed
    done
}

# stop_server SIGNAL: ends the server of keep_serving.
stop_server() {
    stopped=INT
    [[ -z $pid ]] || kill "-$1" "$pid" 2>/dev/null || true
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
