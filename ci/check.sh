#!/usr/bin/env bash
# All checks, in order, with the tools on PATH, or those of .venv where it exists: ci/check.sh [--fast]
# --fast leaves pytest out. Every stage runs whatever the ones before it said; the exit status is 1 if any failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
case "${*:-}" in
    "") fast= ;;
    --fast) fast=1 ;;
    *) echo "usage: ci/check.sh [--fast]" >&2 && exit 2 ;;
esac
if [[ -z ${VIRTUAL_ENV:-} && -x .venv/bin/python ]]; then
    export PATH="$PWD/.venv/bin:$PATH"
fi

report=()
failed=()
stage() {
    local name=$1 start=$SECONDS verdict=ok
    shift
    echo "== $name"
    if ! "$@"; then
        verdict=FAILED
        failed+=("$name")
    fi
    report+=("$(printf '%-12s %-6s %4d s' "$name" "$verdict" $((SECONDS - start)))")
}

shell_scripts() {
    local files
    mapfile -t files < <(git ls-files --cached --others --exclude-standard -- '*.sh' .ci/run)
    # Without git, or without files, shellcheck is called with none and fails: nothing passes unchecked.
    shellcheck --external-sources "${files[@]}"
}

stage format ruff format --check
stage ruff ruff check
stage mypy mypy
stage imports lint-imports --no-logo
stage shellcheck shell_scripts
[[ -n $fast ]] || stage pytest python -m pytest

echo "== summary"
printf '%s\n' "${report[@]}"
if ((${#failed[@]})); then
    echo "failed: ${failed[*]}"
    exit 1
fi
