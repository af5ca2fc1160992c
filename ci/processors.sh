#!/usr/bin/env bash
# Tests as on other x86 processors than this one: ci/processors.sh [--quick] [PYTEST_ARGUMENT ...]
# First with the libraries of torch capped to fewer instructions, which runs at full speed; then, if qemu-user is installed,
# on an emulated processor without AVX-512 and one without AVX, which really lack them, and whose programs start others there.
# All tests of tests/torch, the golden traces, and emulated tests/unit: hours. --quick: golden traces, and products.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
# shellcheck source=scripts/env.sh
source scripts/env.sh
use_env "$root" test
if [[ $(uname -m) != x86_64 ]]; then
    echo "not run: ci/processors.sh, because this processor is no x86" && exit
fi
golden=(tests/torch/test_families.py::test_golden_forward_passes tests/e2e/test_golden.py)
everything=(tests/torch "${golden[1]}" tests/e2e/test_golden_families.py tests/dist/test_golden.py)
one=("${golden[0]}[forward-llada-b]")
cache=$(mktemp -d)
trap 'rm -r "$cache"' EXIT
# A cache of its own: the ordinary tests, which may run at the same time, note their failures too.
options=(-q -m "not slow" --hypothesis-profile=ordinary -o "cache_dir=$cache/pytest" --timeout=3600)

status=0
# tests NAME COMMAND ...: what fails does not keep the rest from running.
tests() {
    echo "== as on a processor with $1"
    "${@:2}" || status=1
}

# capped NAME ATEN ONEDNN MKL PYTEST_ARGUMENT ...: caps of one processor, so that no library takes what others lack.
capped() {
    tests "$1" env ATEN_CPU_CAPABILITY="$2" ONEDNN_MAX_CPU_ISA="$3" MKL_ENABLE_INSTRUCTIONS="$4" \
        python -m pytest "${options[@]}" "${@:5}"
}

# emulated NAME MODEL PYTEST_ARGUMENT ...: an environment whose python is the emulator, also for the processes that it starts.
emulated() {
    local environment=$cache/$2 python
    python=$(readlink -f "$VIRTUAL_ENV/bin/python")
    mkdir -p "$environment/bin"
    cp "$VIRTUAL_ENV/pyvenv.cfg" "$environment"
    ln -sfn "$VIRTUAL_ENV/lib" "$environment/lib"
    # shellcheck disable=SC2016 # what stands there is for the new script
    printf '#!/bin/sh\nexec "%s" -cpu %s -0 "$0" "%s" "$@"\n' "$emulator" "$2" "$python" >"$environment/bin/python"
    chmod +x "$environment/bin/python"
    tests "$1, emulated" "$environment/bin/python" -m pytest "${options[@]}" "${@:3}"
}

# The features that are taken off a model are those that the emulator does not know, and would name on stderr.
unknown=-pcid,-x2apic,-tsc-deadline,-invpcid,-spec-ctrl
haswell=Haswell-v4,$unknown nehalem=Nehalem-v1,$unknown
emulator=$(command -v qemu-x86_64 || command -v qemu-x86_64-static || true)
if [[ ${1:-} == --quick ]]; then
    capped "AVX2" avx2 AVX2 AVX2 "${golden[@]}" tests/torch/test_int8.py tests/torch/test_integers.py tests/torch/test_ops.py "${@:2}"
    [[ -z $emulator ]] || emulated "AVX2" "$haswell" "${one[@]}" "${@:2}"
else
    capped "AVX-512 but no AMX" avx512 AVX512_CORE AVX2 "${everything[@]}" "$@"
    capped "AVX2" avx2 AVX2 AVX2 "${everything[@]}" "$@"
    capped "SSE4.2" default SSE41 SSE4_2 "${everything[@]}" "$@"
    if [[ -n $emulator ]]; then
        emulated "AVX2" "$haswell" "${everything[@]}" tests/unit "$@"
        emulated "SSE4.2" "$nehalem" "${golden[@]}" "$@"
    fi
fi
[[ -n $emulator ]] || echo "not run: emulated processors, because there is no qemu-x86_64 (Debian, Ubuntu: apt-get install qemu-user)"
exit $status
