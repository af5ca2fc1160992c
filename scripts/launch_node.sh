#!/usr/bin/env bash
# One server on one 910C node: ./scripts/launch_node.sh --help
set -euo pipefail
# shellcheck source=scripts/launch_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh"
flag+=([bp]=4)

usage() {
    cat <<END
Starts one server on one 910C node, by default on all 16 dies: 4 branch parallel groups of 4 tensor parallel ranks.
The script checks the machine first, and prints what to do if something is missing. Then it becomes torchrun, which starts
the ranks, and starts all of them again when one ends. The server is up when /health answers 200.

usage: launch_node.sh [FLAGS] [-- FLAGS OF python -m lopa_ascend.serve]

  launch_node.sh --model Dream-v0-Instruct-7B --lora-path D2F_Dream_Instruct_7B_Lora
  launch_node.sh --model Dream-v0-Instruct-7B --bp 4 -- --num-branches 7      each group takes 2 of the 8 branches
  ASCEND_RT_VISIBLE_DEVICES=8,9,10,11 HCCL_IF_BASE_PORT=60032 launch_node.sh --bp 1 --port 8001 --master-port 29501
  launch_node.sh --device cpu --tp 2 --bp 2                                   the bundled model, without an NPU

  --selftest           run the self-test of the NPUs (scripts.npu_selftest) in place of the server; its flags go after --

$(flags_help)
END
}

parse_flags "$@"
choose_python
preflight
make_environment "${ASCEND_RT_VISIBLE_DEVICES-$(seq -s, 0 $((ranks - 1)))}"
make_command "${flag[port]}" "${flag[master-port]}" --nnodes 1 --master-addr 127.0.0.1
[[ -z $dry_run ]] || { show && exit; }
exec env "${environment[@]}" "${command[@]}"
