"""The entry of scripts.eval, and the problems of the bundled model that it reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lopa_ascend.demo import HANDWRITTEN, HELD_OUT, INDEPENDENT
from scripts.eval import demo
from scripts.eval.__main__ import SUBCOMMANDS, main
from scripts.eval.problems import SETS, parse_result, read

ROOT = Path(__file__).parents[2]


def test_help_lists_each_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("    ")] == list(SUBCOMMANDS)


def test_each_subcommand_has_a_help_that_loads_no_torch() -> None:
    program = f"""
import sys
from scripts.eval.__main__ import main
for name in {list(SUBCOMMANDS)}:
    try:
        main([name, "--help"])
    except SystemExit as ended:
        assert not ended.code, name
sys.exit("torch is loaded" if "torch" in sys.modules else 0)
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert all(f"usage: python -m scripts.eval {name} " in run.stdout for name in SUBCOMMANDS)


def test_an_unknown_subcommand_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["evaluate"])
    assert "invalid choice: 'evaluate'" in capsys.readouterr().err


def test_each_file_of_problems_is_read_with_results() -> None:
    for path, count in ((HELD_OUT, 500), (HANDWRITTEN, 200), (INDEPENDENT, 150)):
        problems = read(1000, path)
        assert len(problems) == count
        assert all(question and isinstance(result, int) for question, result in problems)
    assert list(SETS.values()) == [HELD_OUT, HANDWRITTEN, INDEPENDENT]
    assert read(2) == read()[:2]


def test_a_problem_without_a_result_is_named(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text('{"question": "1 + 1?", "answer": "two"}\n')
    with pytest.raises(ValueError, match=r"the answer to '1 \+ 1\?' has no number after ####"):
        read(path=path)


def test_parse_result() -> None:
    assert parse_result("12+3=15\n#### 15") == 15
    assert parse_result("#### 1 and #### 2") == 2
    assert parse_result("####") is None
    assert parse_result("no number") is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--num-branches 3 --decoding d2f", 'argument --num-branches: 3 does not go with decoding "d2f"'),
        ("--block-size 8 0", "argument --block-size: must be an integer from 1 to 4096, got 0"),
        ("--sets easy", "argument --sets: invalid choice: 'easy'"),
        ("--model absent", "absent"),
    ],
)
def test_demo_refuses_mistakes(capsys: pytest.CaptureFixture[str], argv: str, message: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.main(argv.split())
    assert message in capsys.readouterr().err
