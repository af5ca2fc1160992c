"""The example of a decoding strategy: what it decides, how it is registered, and that its page shows it."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from examples.near_first.near_first import NearFirst
from lopa_ascend import register_decoding
from lopa_ascend.config import DecodingParams, ParameterError, decodings, fitting_defaults
from lopa_ascend.decode import begin
from lopa_ascend.decode.block_pipeline import BlockPipeline
from lopa_ascend.decode.lopa import Lookaheads, LopaParams
from lopa_ascend.decode.strategy import SequenceStart, Strategy
from lopa_ascend.types import RowResult, StepRecord

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "near_first"
NAME = "near_first"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decodings, "_registered", dict(decodings._registered))
    register_decoding(NAME, NearFirst)


def one_pass(strategy: Strategy, prob: float) -> tuple[int, StepRecord]:
    """The rows of a pass in which every position predicts the same token with this probability, and its record."""
    plan = strategy.plan()
    assert plan is not None
    rows = [RowResult((5,) * len(r.masked), (prob,) * len(r.masked), (prob,) * len(r.masked)) for r in plan.rows]
    return len(rows), strategy.absorb(plan, rows, 0, 0)


@pytest.mark.usefixtures("registered")
def test_it_fills_near_positions_and_looks_ahead_only_where_it_waits() -> None:
    params = DecodingParams(decoding=NAME, num_branches=4, block_size=16, max_new_tokens=16, tau_conf=0.9)
    strategy = begin(SequenceStart([1], params, 99, frozenset()))
    assert type(strategy) is NearFirst
    num_rows, record = one_pass(strategy, 0.911)
    assert num_rows == 1
    assert [fill.position for fill in record.fills] == [1, 2, 3, 4, 5, 6]
    assert record.fallbacks == 0
    num_rows, record = one_pass(strategy, 0.5)
    assert (num_rows, len(record.fills), record.fallbacks) == (1, 1, 1)
    num_rows, record = one_pass(strategy, 0.911)
    assert num_rows == 5
    assert record.fallbacks == 0
    assert one_pass(strategy, 0.95)[0] == 1


@pytest.mark.usefixtures("registered")
def test_it_goes_with_the_parameters_of_lopa() -> None:
    params = DecodingParams(decoding=NAME)
    assert (params.num_branches, params.window_attention, params.is_pipelined) == (3, "block_causal", True)
    with pytest.raises(ParameterError, match=r'branch_acceptance.*"exact" does not go with decoding "near_first"'):
        DecodingParams(decoding=NAME, branch_acceptance="exact")
    with pytest.raises(ParameterError, match=r'base.*"parallel" does not go with decoding "near_first"'):
        DecodingParams(decoding=NAME, base="parallel")
    with pytest.raises(ParameterError, match=r'steps.*does not go with decoding "near_first"'):
        DecodingParams(decoding=NAME, steps=4)
    defaults = {"num_branches": 5, "base": "parallel", "branch_acceptance": "exact", "tau_conf": 0.5}
    assert fitting_defaults(defaults, {"decoding": NAME}) == {"tau_conf": 0.5}


def test_pages_are_reserved_for_as_many_rows_as_the_request_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever class decodes it: page tables are made before the strategy, for these rows."""
    monkeypatch.setattr(decodings, "_registered", dict(decodings._registered))
    register_decoding("alone", type("Alone", (Lookaheads, BlockPipeline), {"parameters": LopaParams}))
    params = DecodingParams(decoding="alone", num_branches=4)
    assert begin(SequenceStart([1], params, 99, frozenset())).max_rows == 5 == 1 + params.lookaheads


def test_names_and_strategies_that_cannot_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decodings, "_registered", dict(decodings._registered))
    register_decoding(NAME, NearFirst)
    register_decoding(NAME, NearFirst)
    with pytest.raises(ValueError, match="'near_first' is registered already"):
        register_decoding(NAME, type("Other", (NearFirst,), {}))
    with pytest.raises(ValueError, match="'lopa' is registered already"):
        register_decoding("lopa", NearFirst)
    with pytest.raises(TypeError, match="must be a subclass"):
        register_decoding("other", dict)  # type: ignore[arg-type]


def test_an_entry_point_is_found_when_a_request_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(decodings, "_registered", dict(decodings._registered))
    with pytest.raises(ParameterError, match="unknown value 'near_first'; choose one of lopa, d2f, parallel"):
        DecodingParams(decoding=NAME)
    value = "examples.near_first.near_first:NearFirst"
    points = {
        NAME: EntryPoint(NAME, value, decodings.GROUP),
        "broken": EntryPoint("broken", "no_such_module:X", decodings.GROUP),
        "failing": EntryPoint("failing", "failing_module:X", decodings.GROUP),
    }
    monkeypatch.setattr(decodings, "_installed", lambda: points)
    (tmp_path / "failing_module.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    for name, module in (("broken", "no_such_module"), ("failing", "failing_module")):
        message = f"entry point '{module}:X' cannot be loaded"
        with pytest.raises(ParameterError, match=message):
            DecodingParams(decoding=name)
        with pytest.raises(ParameterError, match=message) as error:  # the server asks first
            fitting_defaults({}, {"decoding": name})
        assert error.value.param == "decoding"
    assert type(begin(SequenceStart([1], DecodingParams(decoding=NAME), 99, frozenset()))) is NearFirst
    assert decodings.known_decodings() == (*decodings.built_in_decodings(), "broken", "failing", NAME)
    project = (EXAMPLE / "pyproject.toml").read_text("utf-8")
    assert f'[project.entry-points."{decodings.GROUP}"]\n{NAME} = "near_first:NearFirst"\n' in project


def test_the_page_shows_the_code_of_the_example() -> None:
    page = (ROOT / "docs" / "add-a-decoding.md").read_text("utf-8")
    blocks = re.findall(r"```(\w+)\n(.*?)```", page, flags=re.DOTALL)
    found = {
        "python": (EXAMPLE / "near_first.py").read_text("utf-8"),
        "toml": (EXAMPLE / "pyproject.toml").read_text("utf-8"),
    }
    shown = [(kind, text) for kind, text in blocks if "register_decoding" not in text]
    assert [kind for kind, _ in shown] == ["python", "python", "toml"]
    for kind, text in shown:
        assert text in found[kind]
