#!/usr/bin/env bash
# Sets up .venv with the judges' tools if needed, then runs them against the server: ci/judges.sh [JUDGE ...] [--help]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/env.sh
source "$root/scripts/env.sh"
use_env "$root" judge
cd "$root"

# Clients of other projects, in the versions that a file names: set_up ENVIRONMENT FILE.
set_up() {
    if ! cmp -s "$2" "$1/installed"; then
        echo "judges: installing clients into $1 (minutes, once)" >&2
        python -m venv --clear "$1"
        "$1/bin/pip" install --quiet --disable-pip-version-check --requirement "$2"
        cp "$2" "$1/installed"
    fi
}

# .venv-clients and .venv-instructor, and node_modules if there is npm.
set_up_clients() {
    local programs=tests/judges/programs
    set_up .venv-clients $programs/requirements.txt
    set_up .venv-instructor $programs/instructor.txt
    if command -v npm >/dev/null; then
        npm install --silent --no-package-lock --prefix $programs
    fi
}

case " $* " in
    "  " | " -"* | *" clients "* | *" structured "*) set_up_clients ;;
esac
exec python -m tests.judges "$@"
