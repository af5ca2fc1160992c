#!/usr/bin/env bash
# Sets up .venv if needed, then starts the server: ./scripts/serve.sh [flags of `python -m lopa_ascend.serve`]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/env.sh
source "$root/scripts/env.sh"
use_env "$root"
# OpenMP's default, spinning, collapses as soon as another process wants a core.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
exec python -m lopa_ascend.serve "$@"
