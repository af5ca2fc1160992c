#!/usr/bin/env bash
# Several independent servers on one 910C node: ./scripts/launch/replicas.sh --help
set -euo pipefail
# shellcheck source=scripts/launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
flag+=([bp]=1 [replicas]=4)

usage() {
    cat <<END
Starts several independent servers on one 910C node, by default 4 on 4 dies each, for a load balancer that asks /health.
Replica i serves on --port + i, and it has the dies that follow those of replica i - 1. The script checks the machine first,
and prints what to do if something is missing. A replica that fails is started again while the others serve. When one has
used up --max-restarts, all end and the exit status is not 0. The supervisor of this script then starts them together, after
the checks, so that no node goes on with fewer replicas than it should have.

usage: replicas.sh [FLAGS] [-- FLAGS OF python -m lopa_ascend.serve]

  replicas.sh --model Dream-v0-Instruct-7B --host 0.0.0.0              ports 8000 to 8003
  replicas.sh --model Dream-v0-Instruct-7B --replicas 8 --tp 2         8 servers on a package each
  replicas.sh --device cpu --replicas 2 --tp 1                         the bundled model, without an NPU

  --replicas N         number of servers ($(default replicas))

$(flags_help)
END
}

# Ends the replicas that were started.
end_all() { ((${#pids[@]} == 0)) || kill -TERM "${pids[@]}" 2>/dev/null || true; }

parse_flags "$@"
[[ -z $selftest ]] || refuse "--selftest is a flag of node.sh, which tests the dies of all replicas"
choose_python
check_launch
IFS=, read -ra dies <<<"${ASCEND_RT_VISIBLE_DEVICES-$(seq -s, 0 $((ranks * flag[replicas] - 1)))}"
scheme=http host=${flag[host]} first_port=${flag[port]} pids=() stopped="" status=0
[[ " ${program_flags[*]}" != *" --ssl-certfile"* ]] || scheme=https
[[ $host != *:* ]] || host="[$host]"

# Each signal ends the replicas, and then this script. Replicas that start meanwhile are ended after the loop.
trap 'stopped=1 && end_all' TERM INT HUP
for ((replica = 0; replica < flag[replicas]; replica++)); do
    first=$((replica * ranks))
    flag[port]=$((first_port + replica))
    make_environment "$(IFS=, && echo "${dies[*]:first:ranks}")" "$replica"
    make_command "${flag[port]}"
    if [[ -n $dry_run ]]; then
        show " &"
        continue
    fi
    keep_serving &
    pids+=($!)
    echo "replica $replica: $scheme://$host:${flag[port]}"
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
