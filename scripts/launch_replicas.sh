#!/usr/bin/env bash
# Several independent servers on one 910C node: ./scripts/launch_replicas.sh --help
set -euo pipefail
# shellcheck source=scripts/launch_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh"
flag+=([bp]=1 [replicas]=4)

usage() {
    cat <<END
Starts several independent servers on one 910C node, by default 4 on 4 dies each, for a load balancer that asks /health.
Replica i serves on --port + i, its ranks meet on --master-port + i, and it has the dies that follow those of replica
i - 1. The script checks the machine first, and prints what to do if something is missing. Each replica has its own
torchrun: one that fails is started again while the others serve. When one has used up --max-restarts, all end and the
exit status is not 0. The supervisor of this script then starts them together, after the checks, so that no node goes on
with fewer replicas than it should have.

usage: launch_replicas.sh [FLAGS] [-- FLAGS OF python -m lopa_ascend.serve]

  launch_replicas.sh --model Dream-v0-Instruct-7B --host 0.0.0.0              ports 8000 to 8003
  launch_replicas.sh --model Dream-v0-Instruct-7B --replicas 8 --tp 2         8 servers on a package each
  launch_replicas.sh --device cpu --replicas 2 --tp 1                         the bundled model, without an NPU

  --replicas N         number of servers ($(default replicas))

$(flags_help)
END
}

# prepare REPLICA: sets `environment` and `command` for one replica.
prepare() {
    local first=$(($1 * ranks))
    make_environment "$(IFS=, && echo "${dies[*]:first:ranks}")" "$1"
    make_command $((flag[port] + $1)) $((flag[master-port] + $1)) --nnodes 1 --master-addr 127.0.0.1
}

# Sends SIGTERM to the replicas that were started and have got none: a second one, while torchrun acts on the first, makes
# it write a traceback.
end_all() {
    local untold=("${pids[@]:told}")
    told=${#pids[@]}
    ((${#untold[@]} == 0)) || kill -TERM "${untold[@]}" 2>/dev/null || true
}

parse_flags "$@"
[[ -z $selftest ]] || refuse "--selftest is a flag of launch_node.sh, which tests the dies of all replicas"
choose_python
preflight
IFS=, read -ra dies <<<"${ASCEND_RT_VISIBLE_DEVICES-$(seq -s, 0 $((ranks * flag[replicas] - 1)))}"
scheme=http host=${flag[host]} pids=() told=0 stopped="" status=0
[[ " ${program_flags[*]}" != *" --ssl-certfile"* ]] || scheme=https
[[ $host != *:* ]] || host="[$host]"

# Each signal ends the replicas, and then this script. Replicas that start meanwhile are ended after the loop.
trap 'stopped=1 told=0 && end_all' TERM INT HUP
for ((replica = 0; replica < flag[replicas]; replica++)); do
    prepare "$replica"
    if [[ -n $dry_run ]]; then
        show " &"
        continue
    fi
    # A replica has a session of its own, so that Ctrl-C reaches it once, through the trap.
    setsid env "${environment[@]}" "${command[@]}" &
    pids+=($!)
    echo "replica $replica: $scheme://$host:$((flag[port] + replica))"
done
[[ -z $dry_run ]] || { echo wait && exit; }

[[ -n $stopped ]] || wait -n "${pids[@]}" || true
if [[ -z $stopped ]]; then
    status=1
    for replica in "${!pids[@]}"; do
        kill -0 "${pids[replica]}" 2>/dev/null || echo "replica $replica has ended; ending the others" >&2
    done
fi
end_all
until wait; do :; done # a signal interrupts it
exit "$status"
