#!/usr/bin/env bash
# The NPU tests, with the real torch_npu on stand-ins for the CANN libraries: ci/npu.sh [--quick] [PYTEST_ARGUMENT ...]
# --quick leaves the slow ones out, and runs those that failed once more by themselves; --lowering-report counts the
# kernels of Dream-7B's graphs instead, with the figures as JSON in the last line. The first time it makes an environment
# of its own for them, .venv-npu (minutes; needs gcc and binutils); .venv stays as it is. TORCH_NPU=2.10.0.post4 takes that
# version of torch_npu, with the torch of its release, in .venv-npu-2.10.0.post4.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
# shellcheck source=scripts/env.sh
source scripts/env.sh
venv=$root/.venv-npu
torch_npu="torch_npu==${TORCH_NPU:-2.13.0}"
if [[ -n ${TORCH_NPU:-} ]]; then
    venv+=-$TORCH_NPU
    TORCH="torch==${TORCH_NPU%%.post*}"
fi
# What torch_npu, torchair and CANN's Python modules need (torch_npu's wheel names torch, numpy and pyyaml alone), and what
# the tests do.
packages=(protobuf decorator scipy attrs psutil packaging numpy pyyaml "pytest>=8" pytest-timeout hypothesis)

for tool in gcc nm readelf; do
    if ! command -v "$tool" >/dev/null; then
        echo "npu: $tool is missing; install gcc and binutils (Debian, Ubuntu: apt-get install gcc libc6-dev binutils)" >&2
        exit 1
    fi
done

# made_from PART WORDS FILE ...: whether PART was made from these words and files. If not, the caller makes it and then
# calls done_with PART, which records them.
made_from() {
    wanted=$({ echo "$2" && cat "${@:3}"; } | cksum)
    grep -qsxF "$wanted" "$venv/installed-$1"
}

done_with() {
    echo "$wanted" >"$venv/installed-$1"
}

if [[ -e $venv/installing ]] || ! grep -qsF "$venv" "$venv/bin/activate" || ! "$venv/bin/python" -c "" 2>/dev/null; then
    make_venv "${PYTHON:-python3}" "$venv"
fi
export VIRTUAL_ENV=$venv PATH="$venv/bin:$PATH"
unset PYTHONHOME

if ! made_from packages "$TORCH $torch_npu ${packages[*]}" pyproject.toml setup.py; then
    echo "npu: installing $TORCH, $torch_npu and the project into $venv (minutes, once)" >&2
    touch "$venv/installing"
    pip=(python -m pip install --quiet --disable-pip-version-check)
    # torch first, by itself: what comes later finds it there and does not choose another.
    "${pip[@]}" "$TORCH"
    "${pip[@]}" --no-deps "$torch_npu"
    "${pip[@]}" --editable . "${packages[@]}"
    done_with packages
    rm "$venv/installing"
fi
if ! made_from cann "$torch_npu" tests/npu/lab/standins.py tests/npu/lab/acl.c; then
    python tests/npu/lab/standins.py "$venv/cann"
    done_with cann
fi

if [[ ${1:-} == --lowering-report ]]; then
    exec python -W ignore -m tests.npu.lab tests.npu.report
fi
selection=()
quick=
if [[ ${1:-} == --quick ]]; then
    quick=1
    # A cache of its own: the ordinary tests, which may run at the same time, note their failures too.
    selection=(-m "not slow" -o "cache_dir=$venv/pytest-cache")
    shift
fi
where=(tests/npu)
for argument in "$@"; do
    [[ -e ${argument%%::*} ]] && where=()
done
tests=("${where[@]}" "${selection[@]}" "$@")
[[ -z $quick ]] && exec python -m pytest "${tests[@]}"
status=0
python -m pytest "${tests[@]}" || status=$?
((status == 1)) || exit $status # 1: tests failed; above: pytest itself did
echo "npu: those that failed, by themselves, up to the first that fails again"
exec python -m pytest --exitfirst --last-failed --last-failed-no-failures=none -rp "${tests[@]}"
