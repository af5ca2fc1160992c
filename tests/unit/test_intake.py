"""Bodies of requests that come slowly, together, or in the wrong order: nobody waits for another's large body."""

import asyncio
import json
import threading
import time
from typing import Any

import pytest
from starlette.requests import Request

from lopa_ascend.serve.api import body, intake, workers
from lopa_ascend.serve.api.errors import ApiError
from lopa_ascend.serve.api.intake import Intake
from lopa_ascend.serve.api.workers import SMALL_BODY, Lane, Workers
from lopa_ascend.serve.observe.intake import IntakeState

LARGE = SMALL_BODY + 1
HEADERS = [(b"content-type", b"application/json")]
SCOPE: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "headers": HEADERS}


class Sender:
    """A client that sends pieces of a body when it is told to."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.request = Request(SCOPE, self._messages.get)

    def send(self, piece: bytes, more: bool = True) -> None:
        self._messages.put_nowait({"type": "http.request", "body": piece, "more_body": more})


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_large_bodies_share_a_limit_and_small_ones_do_not_count():
    async def run() -> None:
        taking = Intake(10 * LARGE, 2 * LARGE, Workers(4))
        senders = [Sender() for _ in range(4)]
        takes = [asyncio.create_task(taking.take(sender.request, len)) for sender in senders]
        for sender in senders[:2]:
            sender.send(b"1" * LARGE)
        await settle()
        assert taking.memory.used == 2 * LARGE
        senders[2].send(b"1" * 10)
        senders[2].send(b"1" * SMALL_BODY, more=False)  # together it is large
        senders[3].send(b"1" * SMALL_BODY, more=False)
        with pytest.raises(ApiError) as refused:
            await takes[2]
        assert (refused.value.status, refused.value.code) == (503, "queue_full")
        assert refused.value.headers == {"Retry-After": "1"}
        assert [lane.num_refused for lane in taking.workers.lanes] == [0, 1]
        metrics = {metric.name: metric for metric in IntakeState(taking, {"model_name": "tiny"}).collect()}
        refused_by_size = {s.labels["size"]: s.value for s in metrics["lopa:bodies_refused"].samples}
        assert refused_by_size == {"small": 0, "large": 1}
        assert await takes[3] == SMALL_BODY
        takes[0].cancel()  # its client is gone
        await settle()
        senders[1].send(b"1" * LARGE, more=False)
        assert await takes[1] == 2 * LARGE
        assert taking.memory.used == 0
        await taking.workers.close()

    asyncio.run(run())


@pytest.mark.parametrize("limit", [0, SMALL_BODY, 2 * LARGE])
def test_a_body_for_which_there_can_never_be_room_is_too_large(limit: int):
    """A 503 would ask its client to try again."""

    async def run() -> None:
        taking, sender = Intake(10 * LARGE, limit, Workers(1)), Sender()
        taking_it = asyncio.create_task(taking.take(sender.request, len))
        sender.send(b"1" * (max(limit, SMALL_BODY) + 1), more=False)
        with pytest.raises(ApiError) as refused:
            await taking_it
        assert refused.value.status == 413
        assert f"takes at most {max(limit, SMALL_BODY)}" in str(refused.value)
        await taking.workers.close()

    asyncio.run(run())


def test_a_body_that_trickles_in_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(intake, "BODY_TIMEOUT", 0.2)

    async def run(size: int) -> int:
        """How many pieces of ``size`` bytes, 20 a second, are taken until the body is given up; 10 at most."""
        taking, sender = Intake(10**8, 10**8, Workers(1)), Sender()
        take = asyncio.create_task(taking.take(sender.request, len))
        for number in range(10):
            sender.send(b"1" * size, more=number < 9)
            await asyncio.sleep(0.05)
            if take.done() and number < 9:
                with pytest.raises(ApiError, match="in time"):
                    take.result()
                return number
        assert await take == 10 * size
        await taking.workers.close()
        return 10

    assert asyncio.run(run(1)) < 9
    assert asyncio.run(run(64 * 2**10)) == 10


def test_no_small_body_waits_for_a_large_one():
    async def run() -> None:
        both, begun, go = Workers(2), threading.Event(), threading.Event()

        def block() -> str:
            begun.set()
            assert go.wait(10)
            return "large"

        threads = both.lanes[1]._threads
        large = [asyncio.create_task(both.run(LARGE, block)) for _ in range(threads + 2)]
        await asyncio.to_thread(begun.wait, 10)
        assert both.lanes[1].num_waiting == 2
        assert await both.run(SMALL_BODY, lambda: "small") == "small"
        with pytest.raises(ApiError) as refused:
            await both.run(LARGE, lambda: "refused")
        assert (refused.value.status, refused.value.code, both.lanes[1].num_refused) == (503, "queue_full", 1)
        assert both.lanes[1].longest_wait() > 0
        assert both.problem(0.0) is None, "large bodies may wait"
        large.pop().cancel()
        await settle()
        assert both.lanes[1].num_waiting == 1
        go.set()
        assert await asyncio.gather(*large) == ["large"] * (threads + 1)
        assert [lane.num_running + lane.num_waiting for lane in both.lanes] == [0, 0]
        assert both.lanes[1].num_begun == threads + 1
        await both.close()

    asyncio.run(run())


def test_small_bodies_that_wait_for_long_are_a_problem(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers, "SMALL_THREADS", 1)

    async def run() -> None:
        both, go = Workers(1), threading.Event()
        small = [asyncio.create_task(both.run(1, go.wait)) for _ in range(2)]
        await asyncio.sleep(0.1)
        assert both.problem(10.0) is None
        assert "has waited for" in (both.problem(0.05) or "")
        go.set()
        await asyncio.gather(*small)
        assert both.problem(0.0) is None
        await both.close()

    asyncio.run(run())


def test_a_lane_that_is_closed_drops_what_waits():
    async def run() -> None:
        lane, go = Lane("small", 1, 5), threading.Event()
        first, second = (asyncio.create_task(lane.run(go.wait)) for _ in range(2))
        await asyncio.sleep(0.05)
        closing = asyncio.create_task(lane.close())
        await asyncio.sleep(0.05)
        assert not closing.done()
        go.set()
        assert await first
        await closing
        with pytest.raises(asyncio.CancelledError):
            await second
        assert lane.num_waiting == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt": [' + b"[]," * 200_000 + b"[]]}",
        b'{"messages": [' + b'{"role":"user"},' * 60_000 + b"{}]}",
        b"{" + b",".join(b'"%d": 0' % number for number in range(120_000)) + b"}",
        b'{"prompt": "' + b'\\"[' * 10 + b'", "x": ' + b"[" * 100_001,
    ],
    ids=["lists", "objects", "names", "nested"],
)
def test_bodies_of_many_parts_are_refused_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch, raw: bytes):
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(ApiError, match="more than 100000 objects, lists and names"):
        body.parse_completion(raw)


def test_brackets_in_texts_are_no_parts():
    text = '[{:"\\' * 50_000
    assert body.parse_completion(json.dumps({"prompt": text}).encode()).prompt == [text]
    with pytest.raises(ApiError, match="not valid JSON"):
        body.parse_completion(b'{"prompt": "' + b"[" * 100_001)


def test_a_message_about_a_huge_value_is_made_from_its_beginning():
    start = time.thread_time()
    for fields in ({"stop_token_ids": ["x"] * 10**6}, {"n": "9" * 10**6}, {"stop": [0] * 10**6}):
        with pytest.raises(ApiError) as refused:
            body.parse_completion(json.dumps({"prompt": "x", **fields}).encode())
        assert len(refused.value.message) < 300
    assert time.thread_time() - start < 5
