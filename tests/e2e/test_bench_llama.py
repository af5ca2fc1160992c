"""What ``bench llama`` measures, beside a program that prints what llama-bench does."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench.__main__ import main
from scripts.eval import make_checkpoint

PROGRAM = """#!/bin/sh
# Two tests, of 1 and of 4 positions: 2 s and 1 s at best.
printf '[{"model_type": "qwen3 %s", "n_prompt": 1, "samples_ns": [3000000000, 2000000000], ' "$4"
printf '"build_commit": "0c1e570", "backends": "CPU"}'
case "$*" in *"-p 1,4"*)
    printf ', {"model_type": "qwen3 %s", "n_prompt": 4, "samples_ns": [1000000000, 4000000000]}' "$4" ;;
esac
printf ']'
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "llama-bench"
    path.write_text(PROGRAM)
    path.chmod(0o755)
    return path


def test_the_fastest_pass_of_each_kind_stands_in_the_table(
    tmp_path: Path, program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint.main(["--family", "sdar", str(tmp_path / "model")])
    capsys.readouterr()
    pair = f"{tmp_path / 'model'} one.gguf two.gguf"
    options = f"llama {program} {pair} --positions 1 4 --threads 1 --rounds 2 --formats bfloat16 w8a8"
    assert main(options.split()) == 0
    first, *_, heading, _, alone, four = capsys.readouterr().out.splitlines()
    assert "llama.cpp 0c1e570, CPU" in first
    assert heading.split(" | ")[2:-1] == [
        *("ours: bfloat16", "ours: w8a8", "llama.cpp: qwen3 one.gguf", "llama.cpp: qwen3 two.gguf")
    ]
    for row, positions, theirs in ((alone, "1", 2000), (four, "4", 1000)):
        threads, found, *ours, first_file, second_file, ratio = row.strip("| ").split(" | ")
        assert (threads, found, first_file, second_file) == ("1", positions, f"{theirs}.0", f"{theirs}.0")
        assert float(ratio) == pytest.approx(min(map(float, ours)) / theirs, abs=0.006)
        assert 0 < min(map(float, ours)) < 1000


def test_a_model_that_is_missing_is_refused(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["llama", str(program), "missing", "one.gguf"])
    assert "missing" in capsys.readouterr().err
