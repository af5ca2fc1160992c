"""Ctrl-C in a step: the requests that ran end, no page is lost, and none is used twice."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from lopa_ascend import LLM, DecodingParams, GenerationError
from lopa_ascend.config import EngineConfig
from lopa_ascend.engine.engine import INTERRUPTED, Engine
from tests.e2e.batching import decisions, run
from tests.tiny import write_dream

PARAMS = DecodingParams(block_size=8, max_new_tokens=24, tau_conf=0.5, num_branches=2, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8] * 130, [9] * 128]
EOS = 3


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    write_dream(folder, eos_token_id=EOS, hidden=64, heads=4, kv_heads=2)
    return str(folder)


def test_an_interrupted_step_ends_the_requests_that_ran(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    llm = LLM(path)
    params = DecodingParams(max_new_tokens=32, ignore_eos=True)
    stream = llm.stream([5, 6, 7], params)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner.eager.scorer, "score", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[8, 9]], params, quiet=True)
    with pytest.raises(GenerationError, match="a step was interrupted"):
        next(stream)
    assert not llm.engine.stats().pages_in_use
    again = llm.generate([[8, 9]], params, quiet=True)[0]
    assert again.token_ids == LLM(path).generate([[8, 9]], params, quiet=True)[0].token_ids


def interrupt_call(number: int, function: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
    """The function, but Ctrl-C comes just before or after one of its calls, counted from 1."""
    calls = itertools.count(1)

    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        comes_now = next(calls) == number
        if comes_now and not after:
            raise KeyboardInterrupt
        result = function(*arguments, **keywords)
        if comes_now:
            raise KeyboardInterrupt
        return result

    return wrapper


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("place", ["scheduler.plan", "scheduler.advance", "_update", "step"])
def test_no_update_is_lost_in_silence_wherever_a_step_is_interrupted(
    path: str, place: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while one of two streams is read, in each of the calls that follow: the other stream has all its tokens,
    or an error."""
    params = DecodingParams(block_size=8, max_new_tokens=24, tau_conf=0.5, ignore_eos=True)
    prompts = [[5, 6, 7], [8, 9]]
    llm = LLM(path)
    expected = llm.generate(prompts, params, quiet=True)
    *path_to_owner, name = place.split(".")
    owner = operator.attrgetter("engine." + ".".join(path_to_owner))(llm) if path_to_owner else llm.engine
    errors: list[str] = []
    for number in itertools.count(1):
        read, other = (llm.stream(prompt, params) for prompt in prompts)
        next(read), next(other)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupt_call(number, getattr(owner, name), after=after))
            try:
                for _ in read:
                    pass
                break
            except KeyboardInterrupt:
                pass
        try:
            *_, last = other
            assert last.output is not None
            assert last.output.token_ids == expected[1].token_ids
        except GenerationError as error:
            errors.append(str(error))
        assert not llm.engine.has_work()
        assert not llm.engine.stats().pages_in_use
    assert set(errors) == {INTERRUPTED}
    assert [output.token_ids for output in llm.generate(prompts, params, quiet=True)] == [
        output.token_ids for output in expected
    ]


def test_requests_that_an_interrupted_step_admitted_end_and_their_ids_stay_in_use_until_then(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, params = Engine(EngineConfig(model=path, max_num_seqs=3)), DecodingParams(max_new_tokens=32)
    for name in "abcd":
        engine.add(name, [5, 6], params)
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "plan", interrupt_call(1, engine.scheduler.plan, after=True))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert engine.abort("b")
    assert not engine.abort("b")
    with pytest.raises(ValueError, match="in use"):
        engine.add("a", [5, 6], params)
    assert [(update.request_id, update.error) for update in engine.step()] == [("a", INTERRUPTED), ("c", INTERRUPTED)]
    assert not engine.stats().pages_in_use
    assert [update.request_id for update in engine.step()] == ["d"]


def test_a_prompt_that_an_interrupted_step_did_not_copy_is_computed_again(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(copy: object) -> None:
        raise KeyboardInterrupt

    engine = Engine(EngineConfig(model=path))
    prompt, params = [5, 6, 7], DecodingParams(block_size=8, max_new_tokens=30, tau_conf=0.5)
    expected = run(engine, [(prompt, params)])[0]
    other = [8, 9, 10]
    run(engine, [(other, replace(params, max_new_tokens=1))])  # its prompt is copied into the cache in the next step
    engine.add("interrupted", [11, 12], params)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.pool, "copy_page", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.abort("interrupted")
    assert engine.stats().pages_cached == 0
    fresh = run(Engine(EngineConfig(model=path)), [(other, params)])[0]
    assert [decisions(run(engine, [asked])[0]) for asked in ((other, params), (prompt, params))] == [
        decisions(fresh),
        decisions(expected),
    ]


# ---- in the middle of the bookkeeping --------------------------------------------------------------------------------


def work(llm: LLM) -> list[tuple[int, ...]]:
    """Two streams, one of which is closed early, and requests beside them; the tokens of the latter."""
    read, closed = (llm.stream(prompt, PARAMS) for prompt in PROMPTS[:2])
    next(read), next(closed)
    closed.close()
    outputs = llm.generate(PROMPTS, PARAMS, quiet=True)
    for _ in read:
        pass
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", ["allocate", "release", "share", "give_to_cache"])
def test_no_page_is_lost_or_used_twice_wherever_the_bookkeeping_is_interrupted(
    path: str, name: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(path, max_model_len=256, max_num_seqs=4)
    expected = work(llm)
    scheduler, num_interrupted = llm.engine.scheduler, 0
    for number in range(1, 12, 2):
        scheduler.reset()  # no prompt is cached, so that all of the bookkeeping happens
        with monkeypatch.context() as patch:
            interrupted = interrupt_call(number, getattr(scheduler.allocator, name), after=after)
            patch.setattr(scheduler.allocator, name, interrupted)
            try:
                work(llm)
            except KeyboardInterrupt:
                num_interrupted += 1
            except GenerationError:  # of another request of the step
                pass
        with suppress(GenerationError):  # what was interrupted ends in the next step
            work(llm)
        assert work(llm) == expected
        stats = llm.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.pages_in_use) == (0, 0, 0)
    assert num_interrupted
