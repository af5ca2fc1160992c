#!/usr/bin/env bash
# Sets up .venv if needed, then starts the server: ./scripts/serve.sh [FLAGS OF python -m lopa_ascend.serve]
# ./scripts/serve.sh --help lists the flags. Without any it serves the bundled model on http://127.0.0.1:8000.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/env.sh
source "$root/scripts/env.sh"
use_env "$root"
# By default OpenMP threads spin while they wait, which slows everything down as soon as another process wants a core.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
exec python -m lopa_ascend.serve "$@"
