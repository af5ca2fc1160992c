"""What becomes of choices whose engine, one of several, has ended."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from lopa_ascend.admission import Limits
from lopa_ascend.config import DecodingParams
from lopa_ascend.core import Request
from lopa_ascend.serve.config import ServeConfig
from lopa_ascend.serve.http.api_error import ApiError
from lopa_ascend.serve.link.client import MAX_ATTEMPTS, EngineClient
from lopa_ascend.serve.link.generation import Generation
from lopa_ascend.serve.link.messages import FromEngine, Left, Lost, Ready, Stepped, ToEngine
from lopa_ascend.types import EngineStats, TokenRun, Update

LIMITS = Limits(
    vocab_size=2048,
    mask_token_id=2047,
    max_model_len=500,
    num_pages=100,
    max_num_seqs=4,
    max_num_batched_tokens=600,
    max_num_branches=15,
)
STATS = EngineStats(1, 0, 1, 0, 100, 1)


class Engines:
    """A link whose other end is the test."""

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []
        self.messages: asyncio.Queue[FromEngine] = asyncio.Queue()

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)

    async def receive(self) -> FromEngine:
        return await self.messages.get()

    async def wait(self) -> None:
        await asyncio.Event().wait()

    ending = None

    def kill(self) -> None: ...

    async def close(self) -> None: ...


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[EngineClient, Engines]]:
    engines = Engines()
    ready = Ready(LIMITS, model_name="m", dtype="float32", device="cpu", kv_cache_memory=0, seed=0, ranks=())
    client = await EngineClient.connect(engines, ready, ServeConfig(), None)
    try:
        yield client, engines
    finally:
        await client.close()


def update(tokens: tuple[int, ...], finish_reason: str | None = None) -> Stepped:
    made = Update("r-0", TokenRun(tokens, (0.5,) * len(tokens)), 1, 1, 1, 0, 0, finish_reason=finish_reason)
    return Stepped([made], STATS, "a")


def submit(client: EngineClient, streams: bool) -> Generation:
    return client.submit("r", [Request("", (1, 2), DecodingParams(max_new_tokens=4))], streams=streams)


async def finish(generation: Generation) -> tuple[int, ...]:
    async for _, _, progress in generation.updates():
        if progress.output is not None:
            return progress.output.token_ids
    raise AssertionError("no output")


@pytest.mark.parametrize(("streams", "before"), [(False, (7, 8)), (False, ()), (True, ())])
def test_one_that_its_client_has_seen_nothing_of_begins_again(streams: bool, before: tuple[int, ...]):
    async def run() -> None:
        async with connected() as (client, engines):
            generation = submit(client, streams)
            for message in (update(before), Lost("r-0", "a", "it ended"), update((5, 6), "length")):
                engines.messages.put_nowait(message)
            assert await finish(generation) == (5, 6)
            assert [type(message) for message in engines.sent] == [Request, Request]
            assert engines.sent[0] == engines.sent[1]
            assert client.lost == {("a", "retried"): 1}
            assert (client.num_running, client.num_waiting) == (0, 0)
            client.release(generation)

    asyncio.run(run())


def test_one_that_was_streamed_in_part_fails():
    async def run() -> None:
        async with connected() as (client, engines):
            generation = submit(client, streams=True)
            for message in (update((7,)), Lost("r-0", "a", "it ended")):
                engines.messages.put_nowait(message)
            with pytest.raises(ApiError, match="it ended") as error:
                await finish(generation)
            assert (error.value.status, error.value.code) == (503, "engine_dead")
            assert client.lost == {("a", "failed"): 1}
            assert len(engines.sent) == 1
            client.release(generation)

    asyncio.run(run())


def test_one_that_ends_every_engine_fails_in_the_end():
    async def run() -> None:
        async with connected() as (client, engines):
            generation = submit(client, streams=False)
            for _ in range(MAX_ATTEMPTS):
                engines.messages.put_nowait(Lost("r-0", "a", "it ended"))
            with pytest.raises(ApiError, match="it ended"):
                await finish(generation)
            assert client.lost == {("a", "retried"): MAX_ATTEMPTS - 1, ("a", "failed"): 1}
            client.release(generation)

    asyncio.run(run())


def test_the_queue_grows_and_shrinks_with_the_engines():
    async def run() -> None:
        async with connected() as (client, engines):
            queued = client.config.max_num_queued_reqs
            assert client.capacity == queued + LIMITS.max_num_seqs
            for message in (Stepped([], STATS, "a"), Stepped([], STATS, "b")):
                engines.messages.put_nowait(message)
            await asyncio.sleep(0.05)
            assert client.capacity == queued + 2 * LIMITS.max_num_seqs
            engines.messages.put_nowait(Left("a"))
            await asyncio.sleep(0.05)
            assert client.engines.keys() == {"b"}
            assert client.capacity == queued + LIMITS.max_num_seqs

    asyncio.run(run())
