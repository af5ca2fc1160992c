"""Every recorded trace of the published code of the families, and what the runner says of traces that differ."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from scripts.eval.__main__ import main

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "models"


def run(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, list[str], dict[str, Any]]:
    """(exit status, rows, the last line) of the command."""
    with pytest.raises(SystemExit) as ended:
        main(["golden", str(folder), *flags])
    *rows, last = capsys.readouterr().out.splitlines()
    return int(ended.value.code or 0), rows, json.loads(last)


CASES = {
    "sdar": 12, "fastdllm2": 11, "llada2": 12, "d3llm": 8, "nemotron": 12, "pangu": 12, "orthrus": 10, "a2d": 12,
    "diffcoder": 10, "s2d2": 8,
}  # fmt: skip


@pytest.mark.parametrize(("family", "num_cases"), CASES.items())
def test_every_trace_is_reproduced(family: str, num_cases: int, capsys: pytest.CaptureFixture[str]) -> None:
    status, rows, report = run(GOLDEN / family, capsys)
    assert report == {"cases": num_cases, "equal": num_cases, "different": []}
    assert status == 0
    assert len(rows) == num_cases


def test_every_trace_of_llada_is_reproduced_but_for_guidance(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, report = run(GOLDEN / "llada", capsys)
    assert (status, report["cases"], report["equal"]) == (1, 12, 11)
    ((case, first),) = [different.values() for different in report["different"]]
    assert case == "gsai_cfg"
    assert "cfg_scale: is 0.5, expected 0: there is no classifier-free guidance" in first


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "family": (
        {"family": "llama"},
        "family: unknown value 'llama', expected one of sdar, fastdllm2, llada, llada2, d3llm, nemotron",
    ),
    "model": ({"model_dir": "../absent"}, "model_dir: .*absent has no config.json"),
    "name": (
        {
            "params": {
                "remasking_strategy": "sequential",
                "block_length": 4,
                "denoising_steps": 4,
                "gen_length": 8,
                "n": 1,
            }
        },
        "params: unknown name 'n', expected one of remasking_strategy, confidence_threshold",
    ),
    "value": (
        {"params": {"remasking_strategy": "entropy_bounded", "block_length": 4, "denoising_steps": 4, "gen_length": 8}},
        "remasking_strategy: unknown value 'entropy_bounded', expected one of low_confidence_static",
    ),
    "missing": ({"params": {"remasking_strategy": "sequential"}}, "params: gen_length is missing"),
    "kind": ({"prompt_ids": ["a"]}, r"Expected `int`, got `str` - at `\$.prompt_ids\[0\]`"),
    "ids": ({"prompt_ids": [9999]}, "9999"),
}


def test_what_differs_or_cannot_be_run_is_said_case_by_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(GOLDEN / "sdar" / "model_a", tmp_path / "model_a")
    trace = json.loads((GOLDEN / "sdar" / "static_b4_p8" / "trace.json").read_text())

    def write(case: str, content: str) -> None:
        tmp_path.joinpath(case).mkdir()
        tmp_path.joinpath(case, "trace.json").write_text(content)

    for case, (changes, _) in BROKEN.items():
        write(case, json.dumps({**trace, **changes}))
    write("json", "{")
    write("same", json.dumps(trace))
    write("output", json.dumps({**trace, "output_ids": [*trace["output_ids"][:-1], 1]}))
    other = [{"fills": []}, {"fills": [[8, 3]]}, *trace["trace"][2:]]
    write("fills", json.dumps({**trace, "trace": other}))
    status, rows, report = run(tmp_path, capsys, "--json")
    assert (status, rows) == (1, [])
    assert (report["cases"], report["equal"]) == (len(BROKEN) + 4, 1)
    first = {different["case"]: different["first"] for different in report["different"]}
    for case, (_, message) in {**BROKEN, "json": ({}, "trace.json: .*truncated")}.items():
        assert re.search(message, first[case]), first[case]
    assert first["output"].startswith("output 23: ")
    assert first["fills"].startswith("pass 0 that fills: [(")
    assert first["fills"].endswith("recorded [(8, 3)]")


def test_a_folder_without_traces_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["golden", str(tmp_path)])
    assert ended.value.code == 2
    assert "has no */trace.json" in capsys.readouterr().err
