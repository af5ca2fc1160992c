"""Answers of the bundled model, measured one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.backend.compiler import Eager
from lopa_ascend.demo import HELD_OUT
from lopa_ascend.graph import setup
from scripts.eval.files import read_problems
from scripts.eval.metrics import measure
from scripts.eval.prompts import CHAT, PromptMaker
from scripts.eval.sampler import Plan, run
from scripts.eval.samples import SAMPLES, SampleFile, Setting

SETTINGS = [Setting(DecodingParams(num_branches=k, max_new_tokens=96), f"k = {k}") for k in (0, 3)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(enable_prefix_caching=False, threads=1, seed=0) as llm:
        yield llm


def sampled(llm: LLM, folder: Path, settings: Sequence[Setting], count: int, runs: int, warmup: int = 0) -> list[Any]:
    """The lines of the file of samples."""
    problems = read_problems(HELD_OUT).problems[:count]
    plan = Plan(settings=settings, problems=problems, examples={}, runs=runs, warmup=warmup)
    assert llm.tokenizer is not None
    run(llm, PromptMaker(CHAT, llm.tokenizer), plan, SampleFile(folder, {}), quiet=True)
    return [json.loads(line) for line in (folder / SAMPLES).read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("samples")
    return folder, sampled(llm, folder, SETTINGS, 2, 2)


def test_every_answer_is_measured(whole: tuple[Path, list[Any]]) -> None:
    folder, lines = whole
    assert len({(line["setting"], line["run"], line["index"]) for line in lines}) == len(lines) == 2 * 2 * 2
    for line in lines:
        assert 0 < line["first_seconds"] < line["seconds"]
        assert 0 < line["forward_seconds"] < line["seconds"]
        assert len(line["filled"]) == line["num_forwards"]
        assert sum(line["filled"]) >= line["visible_tokens"] > 0
        assert line["opened_tokens"] >= line["visible_tokens"]
        assert line["pages"] > 0
    samples = SampleFile(folder, {}).samples.values()
    without, three = (measure([s for s in samples if s.setting == setting.key])["summed_tpf"] for setting in SETTINGS)
    assert without is not None
    assert three is not None
    assert three >= without > 1


def test_an_interrupted_run_goes_on(llm: LLM, whole: tuple[Path, list[Any]]) -> None:
    folder, lines = whole
    texts = (folder / SAMPLES).read_text().splitlines(keepends=True)
    (folder / SAMPLES).write_text("".join(texts[:3]) + texts[3][:20])
    after = sampled(llm, folder, SETTINGS, 2, 2)
    assert after[:3] == lines[:3]
    answers = [[(a["setting"], a["run"], a["index"], a["text"]) for a in part] for part in (lines, after)]
    assert answers[0] == answers[1]


def test_with_compiled_steps_the_hosts_work_and_padding_are_measured(tmp_path: Path) -> None:
    """The step is one function here as it is with inductor, which takes minutes to compile it."""
    options: dict[str, Any] = {"graph_mode": "inductor", "graph_window_blocks": 2, "max_num_seqs": 1}
    options |= {"max_model_len": 256, "enable_prefix_caching": False, "threads": 1}
    with mock.patch.object(setup, "load_compiler", return_value=Eager()), LLM(**options) as llm:
        setting = Setting(llm.params(max_new_tokens=32), "recommended")
        (line,) = sampled(llm, tmp_path, [setting], 1, 1, warmup=1)
    assert line["forward_seconds"] is None
    assert 0 < line["host_seconds"] < line["seconds"]
    assert 0 < line["padded_tokens"] < line["graph_tokens"]
    metrics = measure(list(SampleFile(tmp_path, {}).samples.values()))
    assert metrics["outside_share"] is None
    assert metrics["host_share"] is not None
    assert 0 < metrics["host_share"] < 1
