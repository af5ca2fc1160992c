#!/usr/bin/env bash
# Sets up .venv with the judges' tools if needed, then runs them against the server: ci/judges.sh [JUDGE ...] [--help]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/env.sh
source "$root/scripts/env.sh"
use_env "$root" judge
cd "$root"

# The clients of other projects, in the versions that their lock files name: .venv-clients, and node_modules if there is npm.
set_up_clients() {
    local programs=tests/judges/programs
    if ! cmp -s $programs/requirements.txt .venv-clients/installed; then
        echo "judges: installing the clients into .venv-clients (minutes, once)" >&2
        python -m venv --clear .venv-clients
        .venv-clients/bin/pip install --quiet --disable-pip-version-check --requirement $programs/requirements.txt
        cp $programs/requirements.txt .venv-clients/installed
    fi
    if command -v npm >/dev/null; then
        npm install --silent --no-package-lock --prefix $programs
    fi
}

case " $* " in
    "  " | " -"* | *" clients "*) set_up_clients ;;
esac
exec python -m tests.judges "$@"
