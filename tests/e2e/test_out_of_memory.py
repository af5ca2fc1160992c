"""A step for which there is no memory: the engine lives on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lopa_ascend import DecodingParams
from lopa_ascend.backend.compiler import Eager
from lopa_ascend.config import EngineConfig
from lopa_ascend.core import Request
from lopa_ascend.engine.engine import NO_MEMORY, Engine
from lopa_ascend.graph import setup
from lopa_ascend.types import Update
from tests.tiny import write_dream, write_tokenizer

MOST_TOKENS = 300
"""Tokens of the largest step for which there is memory."""
MAX_NUM_BATCHED_TOKENS = 680
"""Room for the large request of a test, and for no other one beside it."""


@pytest.fixture
def path(tmp_path: Any) -> str:
    write_dream(tmp_path)
    write_tokenizer(tmp_path)
    return str(tmp_path)


def engine_with_memory_for_few_tokens(path: str, monkeypatch: pytest.MonkeyPatch, graph_mode: str) -> Engine:
    monkeypatch.setattr(setup, "load_compiler", lambda *_, **__: Eager())
    engine = Engine(EngineConfig(model=path, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS, graph_mode=graph_mode))
    model, forward = engine.runner.model, engine.runner.model.forward

    def limited(inputs: Any, *caches: Any) -> Tensor:
        if len(inputs.tokens) > MOST_TOKENS:
            raise torch.OutOfMemoryError("NPU out of memory. Tried to allocate 9.70 GiB")
        return forward(inputs, *caches)

    monkeypatch.setattr(model, "forward", limited)
    return engine


def finished(engine: Engine) -> dict[str, Update]:
    """The last update of each request, once all have ended."""
    last: dict[str, Update] = {}
    while engine.has_work():
        last.update({update.request_id: update for update in engine.step()})
    return last


@pytest.mark.parametrize(("graph_mode", "neighbour_ends"), [("eager", "length"), ("inductor", "error")])
def test_the_engine_lives_on_and_in_eager_mode_so_do_the_requests_of_other_steps(
    path: str, graph_mode: str, neighbour_ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_with_memory_for_few_tokens(path, monkeypatch, graph_mode)
    small = DecodingParams(max_new_tokens=16, block_size=8, num_branches=1, ignore_eos=True)
    large = DecodingParams(base="parallel", num_branches=15, max_new_tokens=40, ignore_eos=True)
    engine.add(Request("small", (5, 6), small))
    engine.add(Request("large", (5, 6), large))
    last = finished(engine)
    assert last["small"].finish_reason == neighbour_ends
    assert last["large"].finish_reason == "error"
    assert last["large"].error == NO_MEMORY
    assert not engine.stats().pages_in_use
    engine.add(Request("again", (5, 6), small))
    assert finished(engine)["again"].finish_reason == "length"


def test_a_cached_page_that_was_not_copied_is_not_reused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(EngineConfig(model=path, enable_prefix_caching=True))
    params = DecodingParams(max_new_tokens=8, block_size=8, num_branches=1, ignore_eos=True)

    def tokens_of(request_id: str) -> tuple[int, ...]:
        engine.add(Request(request_id, (5, 6, 7), params))
        updates = []
        while engine.has_work():
            updates += engine.step()
        return tuple(token for update in updates for token in update.token_ids)

    def without_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("NPU out of memory")

    expected = tokens_of("first")
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.pool, "copy_page", without_memory)
        engine.add(Request("failing", (5, 6, 7), params))
        assert [update.error for update in engine.step()] == [NO_MEMORY]
    assert tokens_of("later") == expected


def test_an_error_of_another_kind_is_raised(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(EngineConfig(model=path))

    def broken(*_: Any) -> Tensor:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine.runner.model, "forward", broken)
    engine.add(Request("any", (5, 6), DecodingParams(max_new_tokens=8)))
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.step()
