#!/usr/bin/env bash
# The tests of the live view in a real Chromium: ci/view.sh [--screenshots | PYTEST_ARGUMENT ...]
# --screenshots takes the pictures in docs/ anew instead.
# The first time it makes an environment, .venv-view, which adds playwright to the packages of .venv. It brings no browser.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
# shellcheck source=scripts/env.sh
source scripts/env.sh
if ! command -v chromium chromium-browser google-chrome >/dev/null; then
    echo "view: there is no Chromium, so nothing was tested; install it (Debian, Ubuntu: apt-get install chromium)" >&2
    exit 1
fi
use_env "$root" test
venv=$root/.venv-view
wanted=$(echo "$venv" && cksum pyproject.toml)
if ! grep -qsxF "$wanted" "$venv/installed" || [[ ! -x $venv/bin/python ]]; then
    echo "view: installing playwright into $venv (once)" >&2
    make_venv python "$venv"
    packages=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    for site in "$venv"/lib/python3*/site-packages; do
        echo "import site; site.addsitedir('$packages')" >"$site/base.pth"
    done
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "playwright>=1.50,<2"
    echo "$wanted" >"$venv/installed"
fi
[[ ${1:-} == --screenshots ]] && exec "$venv/bin/python" -m tests.view.screenshots
exec "$venv/bin/python" -m pytest tests/view "$@"
