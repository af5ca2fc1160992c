#!/usr/bin/env bash
# The tests of the CUDA backend, without a GPU: ci/cuda.sh [--quick] [PYTEST_ARGUMENT ...]
# Triton interprets the kernels on tensors of the CPU, and compiles them for three generations of GPUs. --quick leaves the
# slow tests out. The first time it makes an environment, .venv-cuda, which adds Triton to the packages of .venv.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
# shellcheck source=scripts/env.sh
source scripts/env.sh
use_env "$root" test
venv=$root/.venv-cuda
wanted=$(echo "$venv" && cksum pyproject.toml)
if ! grep -qsxF "$wanted" "$venv/installed" || [[ ! -x $venv/bin/python ]]; then
    echo "cuda: installing Triton into $venv (a minute, once)" >&2
    make_venv python "$venv"
    packages=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    for site in "$venv"/lib/python3*/site-packages; do
        echo "import site; site.addsitedir('$packages')" >"$site/base.pth"
    done
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[cuda]"
    echo "$wanted" >"$venv/installed"
fi
selection=()
if [[ ${1:-} == --quick ]]; then
    selection=(-m "not slow" -o "cache_dir=$venv/pytest-cache" --numprocesses 2)
    shift
fi
export TRITON_INTERPRET=1 TRITON_CACHE_DIR=$venv/triton
exec "$venv/bin/python" -m pytest tests/cuda "${selection[@]}" "$@"
