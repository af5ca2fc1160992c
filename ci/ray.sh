#!/usr/bin/env bash
# The tests of replicas on Ray Serve: ci/ray.sh [--quick] [PYTEST_ARGUMENT ...]
# --quick leaves the slow ones out. The first time it makes an environment, .venv-ray, which adds Ray to the packages of
# .venv (half a GB).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
# shellcheck source=scripts/env.sh
source scripts/env.sh
use_env "$root" test
venv=$root/.venv-ray
wanted=$(echo "$venv" && cksum pyproject.toml)
if ! grep -qsxF "$wanted" "$venv/installed" || [[ ! -x $venv/bin/python ]]; then
    echo "ray: installing Ray into $venv (a minute, once)" >&2
    make_venv python "$venv"
    packages=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    for site in "$venv"/lib/python3*/site-packages; do
        echo "import site; site.addsitedir('$packages')" >"$site/base.pth"
    done
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[ray]"
    echo "$wanted" >"$venv/installed"
fi
selection=()
if [[ ${1:-} == --quick ]]; then
    selection=(-m "not slow" -o "cache_dir=$venv/pytest-cache")
    shift
fi
exec "$venv/bin/python" -m pytest tests/replicas "${selection[@]}" "$@"
