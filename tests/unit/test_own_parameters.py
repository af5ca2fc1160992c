"""Parameters that a decoding of another package declares itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from lopa_ascend import register_decoding
from lopa_ascend.config import DecodingParams, ParameterError, decodings, fitting_defaults
from lopa_ascend.config.kinds import Choice, Number
from lopa_ascend.config.settings import parameter
from lopa_ascend.core import Request
from lopa_ascend.decode import begin
from lopa_ascend.decode.block_pipeline import BlockPipeline, PipelineParams
from lopa_ascend.decode.lopa import Lopa, LopaParams
from lopa_ascend.decode.strategy import SequenceStart
from lopa_ascend.serve.api.request import asked_parameters
from tests.unit.test_protocol import PLANNER, parsed


@dataclass(frozen=True, kw_only=True)
class Own(LopaParams):
    slope: float = parameter(0.5, Number(0, 1), "how steep")
    shape: str = parameter("line", Choice(("line", "curve")), "its shape")


class Sloped(Lopa):
    confidence = "neg_entropy"
    parameters = Own
    own: Own

    @classmethod
    def check(cls, params: DecodingParams) -> None:
        if params.temperature and params.shape == "curve":
            raise ParameterError("shape", '"curve" needs temperature 0')


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decodings, "_registered", dict(decodings._registered))
    register_decoding("sloped", Sloped)


def test_they_are_checked_and_reach_the_strategy() -> None:
    params = DecodingParams.of(decoding="sloped", slope=1, num_branches=2)
    assert (params.slope, params.shape) == (1, "line")
    strategy = begin(SequenceStart([1], params, 99, frozenset()))
    assert isinstance(strategy, Sloped)
    assert strategy.own == Own(slope=1, shape="line")
    assert DecodingParams(decoding="sloped").slope == 0.5
    assert DecodingParams.of(decoding="sloped") == DecodingParams(decoding="sloped")
    assert begin(SequenceStart([1], DecodingParams(), 99, frozenset())).own == LopaParams()


@pytest.mark.parametrize(
    ("values", "name", "message"),
    [
        ({"decoding": "sloped", "slope": 2}, "slope", "must be a number from 0 to 1, got 2"),
        ({"decoding": "sloped", "shape": "arc"}, "shape", "choose one of line, curve"),
        ({"decoding": "sloped", "shape": "curve", "temperature": 1.0}, "shape", '"curve" needs temperature 0'),
        ({"slope": 0.1}, "slope", '0.1 does not go with decoding "lopa"; use decoding "sloped", or use slope 0.5'),
        ({"decoding": "sloped", "incline": 1}, "incline", "unknown option; choose from decoding, "),
        ({"decoding": "sloped", "confidence": "margin"}, "confidence", 'which uses "neg_entropy"'),
    ],
)
def test_wrong_ones_are_refused_by_name(values: dict[str, Any], name: str, message: str) -> None:
    with pytest.raises(ParameterError) as error:
        DecodingParams.of(**values)
    assert error.value.param == name
    assert message in str(error.value)


def test_one_that_all_decodings_have_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Taken(PipelineParams):
        tau_conf: float = parameter(0.5, Number(0, 1), "another threshold")

    register_decoding("taken", type("Taking", (BlockPipeline,), {"parameters": Taken}))
    with pytest.raises(ParameterError, match='decoding: "taken" declares tau_conf, a parameter of all decodings'):
        DecodingParams(decoding="taken")


def test_what_is_no_decoding_is_refused_where_it_is_added() -> None:
    with pytest.raises(ValueError, match="'other' must be a subclass of lopa_ascend.decode.strategy.Strategy"):
        decodings.add_decoding("other", type("Other", (), {}))
    with pytest.raises(ValueError, match="'other': its `parameters` must be a dataclass, got 5"):
        register_decoding("other", type("Other", (Lopa,), {"parameters": 5}))


def test_a_server_takes_them_beside_its_defaults() -> None:
    request = parsed(decoding="sloped")
    assert asked_parameters(request)[0] == {"decoding": "sloped"}
    (choice,) = request.plan(PLANNER)
    assert (choice.params.slope, choice.params.shape) == (0.5, "line")
    defaults = {"confidence": "margin", "tau_conf": 0.5, "branch_acceptance": "exact"}
    assert fitting_defaults(defaults, {"decoding": "sloped", "slope": 0.1}) == {"tau_conf": 0.5}


def test_they_are_sent_to_the_engine_unchanged() -> None:
    params = DecodingParams.of(decoding="sloped", slope=0.25, shape="curve")
    sent = msgspec.msgpack.encode(Request("id", (1,), params))
    assert msgspec.msgpack.decode(sent, type=Request).params == params


def test_the_pass_reports_the_confidence_that_the_decoding_needs() -> None:
    assert DecodingParams(decoding="sloped").ranking == "neg_entropy"
    assert DecodingParams(decoding="lopa").ranking == "max_prob"
