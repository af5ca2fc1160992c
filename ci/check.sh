#!/usr/bin/env bash
# All checks, with the tools on PATH, or those of .venv where it exists: ci/check.sh [--fast | --ranks | --slow]
# --fast runs the unit tests alone; --ranks the tests of several ranks alone, of which the ordinary run has two files; --slow
# all tests, also those marked slow, which are long or repeat another case, and all examples of properties instead of three
# of twenty.
# mypy runs beside the tests. Every stage runs whatever the ones before it said; the exit status is 1 if any failed.
# Tests that fail run once more by themselves, because a busy machine misses deadlines that an idle one keeps.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
# Of three processes, each runs one file of tests after another; the files begin in the order of testpaths. With two a core
# would be idle for a fifth of the time, because many tests wait.
processes=(-n 3 --dist loadfile --no-loadscope-reorder)
tests=()
case "${*:-}" in
    "")
        tests+=(-m "not slow" --hypothesis-profile=ordinary tests/{graph,torch,e2e,npu,unit,replicas,cuda})
        tests+=(tests/dist/test_{golden,serving}.py)
        # Inductor then compiles no trial programs for vector instructions, and code without them, in half the time.
        export TORCHINDUCTOR_VEC_ISA_OK=0
        ;;
    --slow) ;;
    --fast) tests+=(tests/unit -m "not slow" --hypothesis-profile=ordinary) ;;
    --ranks) tests+=(tests/dist -m "not slow" --hypothesis-profile=ordinary) ;;
    *) echo "usage: ci/check.sh [--fast | --ranks | --slow]" >&2 && exit 2 ;;
esac
if [[ -z ${VIRTUAL_ENV:-} && -x .venv/bin/python ]]; then
    export PATH="$PWD/.venv/bin:$PATH"
fi
# The tests start the project some two hundred times; without bytecode it would be compiled each time.
unset PYTHONDONTWRITEBYTECODE

report=()
failed=()
# verdict NAME STATUS TIME: notes how a stage has ended.
verdict() {
    local word=ok
    if (($2)); then
        word=FAILED
        failed+=("$1")
    fi
    report+=("$(printf '%-12s %-6s %6s' "$1" "$word" "$3")")
}

stage() {
    local name=$1 start=$SECONDS
    shift
    echo "== $name"
    "$@"
    verdict "$name" $? "$((SECONDS - start)) s"
}

shell_scripts() {
    local files
    mapfile -t files < <(git ls-files --cached --others --exclude-standard -- '*.sh' .ci/run)
    # Without git, or without files, shellcheck is called with none and fails: nothing passes unchecked.
    shellcheck --external-sources "${files[@]}"
}

stage format ruff format --check
stage ruff ruff check
stage imports lint-imports --no-logo
stage shellcheck shell_scripts
stage size python -m ci.size --check
stage spread python -m ci.spread --check

# types: what mypy says, and at its end how long it took.
types() {
    local start=$SECONDS status
    mypy
    status=$?
    echo "$((SECONDS - start)) s"
    return $status
}

# run_tests: fails if a test fails that then fails by itself too. `late` says that some failed only beside others.
late=
run_tests() {
    python -m pytest --durations=10 "${processes[@]}" "${tests[@]}"
    local status=$?
    ((status == 1)) || return $status # 1: tests failed; above: pytest itself did
    echo "== pytest: those that failed, by themselves, up to the first that fails again"
    python -m pytest --exitfirst --last-failed --last-failed-no-failures=none -rp "${tests[@]}" || return
    late="tests that failed beside others passed by themselves: see 'those that failed' above"
}

log=$(mktemp)
trap 'rm -f "$log"' EXIT
types >"$log" 2>&1 &
mypy=$!
stage pytest run_tests
wait "$mypy"
verdict mypy $? "$(tail -n 1 "$log")"
echo "== mypy"
cat "$log"

echo "== summary"
printf '%s\n' "${report[@]}"
[[ -n $late ]] && echo "$late"
if ((${#failed[@]})); then
    echo "failed: ${failed[*]}"
    exit 1
fi
