#!/usr/bin/env bash
# The tests of the CUDA backend, without a GPU: ci/cuda.sh [--quick] [--triton VERSION] [PYTEST_ARGUMENT ...]
# Triton interprets the kernels on tensors of the CPU, and compiles them for six kinds of GPUs. --quick leaves the slow
# tests out. The first time it makes an environment, .venv-cuda, which adds Triton to the packages of .venv.
# --triton takes another version than torch 2.13 brings, in an environment of its own: 3.6.0 (torch 2.11), 3.9.0.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
# shellcheck source=scripts/env.sh
source scripts/env.sh
quick='' triton=3.7.1 suffix=''
while [[ ${1:-} == --quick || ${1:-} == --triton ]]; do
    case $1 in
    --quick) quick=1 && shift ;;
    --triton) triton=${2:?--triton needs a version, as 3.9.0} suffix=-$2 && shift 2 ;;
    esac
done
use_env "$root" test
venv=$root/.venv-cuda$suffix
wanted="$venv $triton $(cksum pyproject.toml)"
if ! grep -qsxF "$wanted" "$venv/installed" || [[ ! -x $venv/bin/python ]]; then
    echo "cuda: installing Triton $triton into $venv (a minute, once)" >&2
    make_venv python "$venv"
    packages=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    for site in "$venv"/lib/python3*/site-packages; do
        echo "import site; site.addsitedir('$packages')" >"$site/base.pth"
    done
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[cuda]" "triton==$triton"
    echo "$wanted" >"$venv/installed"
fi
tests=tests/cuda
# Its interpreter does not run on NumPy 2.4; its compiler does.
[[ $triton == 3.6.* ]] && tests=tests/cuda/test_resources.py
selection=()
if [[ -n $quick ]]; then
    selection=(-m "not slow" -o "cache_dir=$venv/pytest-cache" --numprocesses 2)
fi
export TRITON_INTERPRET=1 TRITON_CACHE_DIR=$venv/triton
exec "$venv/bin/python" -m pytest "$tests" "${selection[@]}" "$@"
