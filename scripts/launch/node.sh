#!/usr/bin/env bash
# One server on one 910C node: ./scripts/launch/node.sh --help
set -euo pipefail
# shellcheck source=scripts/launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
flag+=([bp]=4)

usage() {
    cat <<END
Starts one server on one 910C node, by default on all 16 dies: 4 branch parallel groups of 4 tensor parallel ranks.
The script checks the machine first, and prints what to do if something is missing. Then it starts the server, which starts
its ranks, and starts it again when it fails. The server is up when /health answers 200.

usage: node.sh [FLAGS] [-- FLAGS OF python -m lopa_ascend.serve]

  node.sh --model Dream-v0-Instruct-7B --lora-path D2F_Dream_Instruct_7B_Lora
  node.sh --model Dream-v0-Instruct-7B --bp 4 -- --num-branches 7      each group takes 2 of the 8 branches
  ASCEND_RT_VISIBLE_DEVICES=8,9,10,11 HCCL_IF_BASE_PORT=60032 node.sh --bp 1 --port 8001
  node.sh --device cpu --tp 2 --bp 2                                   the bundled model, without an NPU

  --selftest           run the self-test of the NPUs (scripts.selftest) in place of the server; its flags go after --

$(flags_help)
END
}

parse_flags "$@"
choose_python
check_launch
make_environment "${ASCEND_RT_VISIBLE_DEVICES-$(seq -s, 0 $((ranks - 1)))}"
if [[ -n $selftest ]]; then
    make_command "${flag[port]}" --standalone --local-addr 127.0.0.1
    become_command
fi
make_command "${flag[port]}"
[[ -z $dry_run && ${flag[max-restarts]} != 0 ]] || become_command
keep_serving
