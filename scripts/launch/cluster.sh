#!/usr/bin/env bash
# One server on several 910C nodes, run on each of them: ./scripts/launch/cluster.sh --help
set -euo pipefail
# shellcheck source=scripts/launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
flag+=([bp]=8 [nnodes]=2 [node-rank]="" [master-addr]="" [master-port]=29500 [interface]="")

usage() {
    cat <<END
Starts one server on several 910C nodes. Run the same command on every node, with another --node-rank on each; node 0
serves HTTP. A tensor parallel group stays within a node, so --bp must be a multiple of --nnodes; only branch parallelism
crosses nodes. The script checks its own node first, and prints what to do if something is missing. Then it becomes
torchrun, which waits until all nodes are there; the server is up when /health on node 0 answers 200. A signal ends torchrun
with a SignalException and exit status 1, after its ranks.

Port --master-port of node 0 listens on every interface and asks nobody who he is: let only the nodes reach it.

usage: cluster.sh --node-rank N --master-addr ADDRESS --interface NAME [FLAGS] [-- FLAGS OF THE SERVER]

  on node 0: cluster.sh --node-rank 0 --master-addr 10.0.0.1 --interface enp67s0f5 --model DIR -- --num-branches 7
  on node 1: cluster.sh --node-rank 1 --master-addr 10.0.0.1 --interface enp67s0f5 --model DIR -- --num-branches 7

  --nnodes N           number of nodes ($(default nnodes))
  --node-rank N        number of this node, from 0
  --master-addr HOST   address of node 0 on the network between the nodes
  --master-port N      port of node 0 on which the ranks find one another ($(default master-port))
  --interface NAME     this node's interface on that network, as \`ip address\` names it, without what follows an @

  --selftest           run the self-test of the NPUs (scripts.selftest) in place of the server; its flags go after --

$(flags_help)
END
}

# Lets running requests go on in the ranks after a signal, for as long as the server's own --shutdown-timeout says and half a
# minute more: torchrun kills ranks after half a minute.
add_shutdown_timeout() {
    local name before="" seconds="" digits='^([0-9]+)(\.[0-9]*)?$'
    for name in "${program_flags[@]}"; do
        [[ $before != --shutdown-timeout ]] || seconds=$name
        [[ $name != --shutdown-timeout=* ]] || seconds=${name#*=}
        before=$name
    done
    [[ -n $seconds ]] || return 0
    [[ $seconds =~ $digits ]] || refuse "--shutdown-timeout $seconds: write seconds in digits, as 120"
    setting TORCH_ELASTIC_SHUTDOWN_TIMEOUT $((10#${BASH_REMATCH[1]} + 30))
}

parse_flags "$@"
for name in node-rank master-addr interface; do
    [[ -n ${flag[$name]} ]] || refuse "--$name is missing"
done
choose_python
check_launch
make_environment "${ASCEND_RT_VISIBLE_DEVICES-$(seq -s, 0 $((ranks - 1)))}"
add_shutdown_timeout
restarts=${flag[max-restarts]}
[[ -z $selftest ]] || restarts=0
make_command "${flag[port]}" --nnodes "${flag[nnodes]}" --node-rank "${flag[node-rank]}" \
    --master-addr "${flag[master-addr]}" --master-port "${flag[master-port]}" --max-restarts "$restarts"
become_command
