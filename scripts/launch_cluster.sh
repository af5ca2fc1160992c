#!/usr/bin/env bash
# One server on several 910C nodes, run on each of them: ./scripts/launch_cluster.sh --help
set -euo pipefail
# shellcheck source=scripts/launch_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh"
flag+=([bp]=8 [nnodes]=2 [node-rank]="" [master-addr]="" [interface]="")

usage() {
    cat <<END
Starts one server on several 910C nodes. Run the same command on every node, with another --node-rank on each; node 0
serves HTTP. A tensor parallel group stays within a node, so --bp must be a multiple of --nnodes; only branch parallelism
crosses nodes. The script checks its own node first, and prints what to do if something is missing. Then it becomes
torchrun, which waits until all nodes are there; the server is up when /health on node 0 answers 200.

usage: launch_cluster.sh --node-rank N --master-addr ADDRESS --interface NAME [FLAGS] [-- FLAGS OF THE SERVER]

  on node 0: launch_cluster.sh --node-rank 0 --master-addr 10.0.0.1 --interface enp67s0f5 --model DIR -- --num-branches 7
  on node 1: launch_cluster.sh --node-rank 1 --master-addr 10.0.0.1 --interface enp67s0f5 --model DIR -- --num-branches 7

  --nnodes N           number of nodes ($(default nnodes))
  --node-rank N        number of this node, from 0
  --master-addr HOST   address of node 0 on the network between the nodes
  --interface NAME     this node's interface on that network, as \`ip address\` names it, without what follows an @

  --selftest           run the self-test of the NPUs (scripts.npu_selftest) in place of the server; its flags go after --

$(flags_help)
END
}

parse_flags "$@"
for name in node-rank master-addr interface; do
    [[ -n ${flag[$name]} ]] || refuse "--$name is missing"
done
choose_python
preflight
make_environment "${ASCEND_RT_VISIBLE_DEVICES-$(seq -s, 0 $((ranks - 1)))}"
make_command "${flag[port]}" "${flag[master-port]}" \
    --nnodes "${flag[nnodes]}" --node-rank "${flag[node-rank]}" --master-addr "${flag[master-addr]}"
[[ -z $dry_run ]] || { show && exit; }
exec env "${environment[@]}" "${command[@]}"
