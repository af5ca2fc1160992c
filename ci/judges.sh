#!/usr/bin/env bash
# Sets up .venv with the judges' tools if needed, then runs them against the server: ci/judges.sh [JUDGE ...] [--help]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/env.sh
source "$root/scripts/env.sh"
use_env "$root" judge
cd "$root"
exec python -m tests.judges "$@"
