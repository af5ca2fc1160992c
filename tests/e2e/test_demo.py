"""The bundled model, as a new user meets it."""

from __future__ import annotations

import io
import re
import runpy
import sys
from pathlib import Path

import pytest

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.demo import HANDWRITTEN
from scripts.eval.demo import decoding, evaluate
from scripts.eval.problems import read
from tests.e2e.conftest import running
from tests.tiers import slow_but

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM()


@pytest.mark.parametrize("count", slow_but([8, 60], [8]))
def test_it_solves_held_out_problems_in_few_forward_passes(llm: LLM, count: int) -> None:
    """Floors below the measured figures: it fails when the model or the decoding is broken. Both solved all
    of the first 60 problems, in blocks of 8 with 7.1 and 7.2 tokens per forward pass."""
    problems = read(count)
    d2f, lopa = (evaluate(llm, problems, decoding(num_branches=k)) for k in (0, 7))
    assert d2f.accuracy >= 0.8
    assert lopa.accuracy >= 0.8
    assert d2f.tpf > 5
    assert lopa.tpf > d2f.tpf


@pytest.mark.parametrize("count", slow_but([8, 20], [8]))
def test_branches_fill_more_in_longer_blocks(llm: LLM, count: int) -> None:
    """A floor below the 2.0 times that were measured on 500 problems."""
    problems = read(count)
    d2f, lopa = (evaluate(llm, problems, decoding(num_branches=k, block_size=32)) for k in (0, 7))
    assert lopa.tpf > 1.5 * d2f.tpf


@pytest.mark.parametrize("count", slow_but([20, 60], [20]))
def test_it_solves_problems_in_other_peoples_words(llm: LLM, count: int) -> None:
    """A floor: 59 of the first 60 were solved."""
    outcome = evaluate(llm, read(count, HANDWRITTEN), decoding(num_branches=0))
    assert outcome.accuracy >= 0.85


def test_it_ends_by_itself_with_the_default_parameters(llm: LLM) -> None:
    question = "Tom has 12 apples. Tom buys 35 more. How many apples does Tom have now?"
    output = llm.chat([[{"role": "user", "content": question}]], quiet=True)[0]
    assert output.finish_reason == "stop"
    assert output.text.rpartition("#### ")[2] == "47"


def test_any_text_is_a_prompt(llm: LLM) -> None:
    for prompt in ("x", "naïve 火 \U0001f600", "<|user|>Tom<|assistant|>", "\n\n"):
        assert llm.generate(prompt, DecodingParams(max_new_tokens=33), quiet=True)[0].text is not None


def test_the_readmes_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "LLM()" in block]
    exec(compile(code, "README.md", "exec"), {})
    assert "####" in capsys.readouterr().out


def test_the_checkpoint_is_small() -> None:
    files = [file for file in (ROOT / "lopa_ascend" / "demo").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 20e6


def test_the_examples_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(name: str, *arguments: str, typed: str = "") -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    question = "Tom has 3 pens. Tom buys 4 more pens. How many pens does Tom have now?"
    assert "#### 7" in run("chat", typed=f"{question}\n\n")
    assert "wins" in run("stream", question)
    with running("--port", "0") as server:
        assert "#### 47" in run("client", server.url)
