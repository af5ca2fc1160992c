#!/usr/bin/env bash
# Sets up .venv with the test tools if needed, then runs all checks: ./ci/test.sh [--fast | --ranks | --slow]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/env.sh
source "$root/scripts/env.sh"
use_env "$root" test
exec "$root/ci/check.sh" "$@"
