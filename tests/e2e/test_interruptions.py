"""Ctrl-C while `LLM` works takes effect between two steps, ends the requests of its call and harms no others. Several
threads may make calls."""

from __future__ import annotations

import itertools
import operator
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.config import EngineConfig
from lopa_ascend.core import Request
from lopa_ascend.engine.engine import BROKEN_OFF, Engine
from lopa_ascend.llm import deferred_interrupts
from tests.tiers import slow_but
from tests.tiny import write_dream

PARAMS = DecodingParams(block_size=8, max_new_tokens=24, tau_conf=0.5, num_branches=2, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8] * 130, [9] * 128]
EOS = 3


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    write_dream(folder, eos_token_id=EOS, hidden=64, heads=4, kv_heads=2)
    return str(folder)


@pytest.fixture(scope="module")
def llm(path: str) -> LLM:
    return LLM(path, max_model_len=256, max_num_seqs=4)


def press_in_call(number: int, function: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
    """The function, but Ctrl-C is pressed just before or after one of its calls, counted from 1."""
    calls = itertools.count(1)

    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        comes_now = next(calls) == number
        if comes_now and not after:
            signal.raise_signal(signal.SIGINT)
        result = function(*arguments, **keywords)
        if comes_now and after:
            signal.raise_signal(signal.SIGINT)
        return result

    return wrapper


def generate_often(llm: LLM) -> None:
    """Generates, with no prompt cached, so that all of the bookkeeping happens."""
    cache = llm.engine.scheduler.prefix_cache
    assert cache is not None
    for _ in range(100):
        with deferred_interrupts():
            cache.clear()
        llm.generate(PROMPTS, PARAMS, quiet=True)


def is_idle(llm: LLM) -> bool:
    stats = llm.engine.stats()
    return (stats.num_running, stats.num_waiting, stats.pages_in_use) == (0, 0, 0)


PLACES = (
    "add",
    "abort",
    "step",
    "_update",
    "scheduler.plan",
    "scheduler.advance",
    "scheduler.allocator.allocate",
    "scheduler.allocator.release",
    "scheduler.allocator.share",
    "scheduler.allocator.give_to_cache",
    "runner.eager.run",
    "runner.eager.commit",
)


@pytest.mark.parametrize(
    ("place", "after"),
    slow_but(itertools.product(PLACES, (False, True)), list(zip(PLACES, itertools.cycle((False, True)), strict=False))),
)
def test_wherever_ctrl_c_is_pressed_the_call_ends_and_another_stream_goes_on(
    llm: LLM, place: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [output.token_ids for output in llm.generate(PROMPTS, PARAMS, quiet=True)]
    *path_to_owner, name = ["engine", *place.split(".")]
    owner = operator.attrgetter(".".join(path_to_owner))(llm)
    for number in range(1, 8, 3):
        other = llm.stream(PROMPTS[0], PARAMS)
        next(other)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, press_in_call(number, getattr(owner, name), after=after))
            with pytest.raises(KeyboardInterrupt):
                generate_often(llm)  # the call of this number may come in a later generation
        *_, last = other
        assert last.output is not None
        assert last.output.token_ids == expected[0]
        assert is_idle(llm)
    assert [output.token_ids for output in llm.generate(PROMPTS, PARAMS, quiet=True)] == expected


def test_ctrl_c_ends_a_stream_that_is_read(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    read, other = (llm.stream(prompt, PARAMS) for prompt in PROMPTS[:2])
    next(read), next(other)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", press_in_call(2, llm.engine.step, after=False))
        with pytest.raises(KeyboardInterrupt):
            list(read)
    assert llm.engine.stats().num_running == 1
    other.close()
    assert is_idle(llm)


def test_ctrl_c_takes_effect_after_the_step_in_which_it_comes(llm: LLM) -> None:
    """From another process or thread, and after at most a few steps."""
    presser = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    presser.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        generate_often(llm)
    assert time.monotonic() - begin < 5
    assert is_idle(llm)


def test_a_handler_of_the_caller_is_called_once_and_stays() -> None:
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        own = signal.getsignal(signal.SIGINT)
        with deferred_interrupts():
            with deferred_interrupts():
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
            assert pressed == []
        assert pressed == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_exception_in_a_step_ends_the_engine_which_says_so(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that a signal handler of the caller raises: what the step has changed is not known."""

    def interrupt(*_: object) -> None:
        raise TimeoutError

    engine = Engine(EngineConfig(model=path))
    engine.add(Request("a", (5, 6), PARAMS))
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.eager, "run", interrupt)
        with pytest.raises(TimeoutError):
            engine.step()
    with pytest.raises(RuntimeError, match=f"this engine has ended: {BROKEN_OFF}"):
        engine.step()
    with pytest.raises(RuntimeError, match="this engine has ended"):
        engine.add(Request("b", (5, 6), PARAMS))


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_several_threads_get_the_answers_that_one_gets(llm: LLM) -> None:
    def generate(prompt: list[int]) -> tuple[int, ...]:
        return llm.generate(prompt, PARAMS, quiet=True)[0].token_ids

    def stream(prompt: list[int]) -> tuple[int, ...]:
        *_, last = llm.stream(prompt, PARAMS)
        assert last.output is not None
        return last.output.token_ids

    prompts = [[5 + n, 6, 7] for n in range(8)]
    expected = [output.token_ids for output in llm.generate(prompts, PARAMS, quiet=True)]
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(call, prompt) for call in (generate, stream) for prompt in prompts]
        assert [future.result() for future in futures] == expected * 2
    assert is_idle(llm)
