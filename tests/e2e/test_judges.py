"""The judges that need no tools, in short, against the bundled model."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest

from lopa_ascend import DecodingParams
from tests.judges import accuracy, faults, fuzz, kill, soak, starve
from tests.judges.report import Options, Report


@pytest.mark.parametrize(
    ("judge", "amount"),
    [
        # One of each kind, some of which wait for time limits; test_serve_hostile.py has the costly ones.
        pytest.param(faults.judge, {"hostile": 0, "good": 12}, id="faults", marks=pytest.mark.slow),
        pytest.param(faults.judge, {"hostile": 400, "good": 24}, id="more-faults", marks=pytest.mark.slow),
        pytest.param(fuzz.judge, {"fuzz_seconds": 120.0}, id="fuzz", marks=pytest.mark.slow),
        pytest.param(starve.judge, {}, id="starve", marks=pytest.mark.slow),
        pytest.param(kill.judge, {}, id="kill", marks=pytest.mark.slow),
        pytest.param(soak.judge, {"minutes": 0.5}, id="soak", marks=pytest.mark.slow),
    ],
)
def test_judge_is_content(judge, amount: dict[str, Any], tmp_path: Path):
    report = Report()
    judge(Options(out=tmp_path, **amount), report)
    # Half a minute says nothing about memory: its pages are touched for the first time.
    assert [what for what in report.failed if not what.startswith("growth")] == []


def test_accuracy_expects_what_the_checkpoint_recommends(monkeypatch: pytest.MonkeyPatch):
    seen: list[DecodingParams] = []

    class Engine:
        def params(self, **options: Any) -> DecodingParams:
            return DecodingParams(block_size=8, **options)

        def chat(self, conversations: Sequence[object], params: DecodingParams) -> list[SimpleNamespace]:
            seen.append(params)
            return [SimpleNamespace(text="#### 1") for _ in conversations]

    monkeypatch.setattr(accuracy, "LLM", Engine)
    assert [text for text, _ in accuracy._in_process(2)] == ["#### 1"] * 2
    assert seen == [DecodingParams(block_size=8, max_new_tokens=accuracy.MAX_NEW_TOKENS)]


def test_accuracy_looks_at_health_pages_and_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    server = SimpleNamespace(health=lambda: 503, await_no_pages=lambda: 3.0, tracebacks=lambda: 1)
    monkeypatch.setattr(accuracy, "serving", lambda *_: contextlib.nullcontext(server))
    monkeypatch.setattr(accuracy, "_in_process", lambda _: [("#### 1", True)])
    monkeypatch.setattr(accuracy, "_lm_eval", lambda *_: CompletedProcess([], 1, "no"))
    monkeypatch.setattr(accuracy, "_check_refusal", lambda *_: None)
    report = Report()
    accuracy.judge(Options(out=tmp_path), report)
    assert {"/health afterwards", "pages in use afterwards", "tracebacks in the server's log"} <= set(report.failed)
