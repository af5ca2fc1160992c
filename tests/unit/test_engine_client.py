"""The client of the engine, with a socket in place of the engine process."""

import asyncio
import itertools
import json
import weakref
from collections.abc import AsyncIterator, Mapping, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from starlette import requests
from starlette.requests import ClientDisconnect

from lopa_ascend import core
from lopa_ascend.admission import Limits
from lopa_ascend.config import DecodingParams, decoding
from lopa_ascend.config.combinations import check_combinations
from lopa_ascend.serve import endpoint as answering
from lopa_ascend.serve.api.completions import CompletionRequest
from lopa_ascend.serve.api.request import Planner
from lopa_ascend.serve.config import ServeConfig
from lopa_ascend.serve.endpoint import Endpoint, ServedModel
from lopa_ascend.serve.http.api_error import ApiError
from lopa_ascend.serve.http.body import Intake, read_body
from lopa_ascend.serve.link import client as linked
from lopa_ascend.serve.link.client import EngineClient
from lopa_ascend.serve.link.messages import Profiled, Ready, Stepped, encode_message
from lopa_ascend.serve.link.spawn import EngineProcess
from lopa_ascend.serve.observe.info import see_a_step
from lopa_ascend.text.prompt import Prompts
from lopa_ascend.types import TokenRun, Update
from tests.tiny import tiny_tokenizer

NUMBERS = itertools.count()
LIMITS = Limits(
    vocab_size=320,
    mask_token_id=319,
    max_model_len=500,
    num_pages=100,
    max_num_seqs=4,
    max_num_batched_tokens=600,
    max_num_branches=15,
)


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[EngineClient, zmq.asyncio.Socket]]:
    """A client, and the socket of its engine."""
    context = zmq.asyncio.Context.instance()
    ours, engines = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    endpoint = f"inproc://engine-{next(NUMBERS)}"  # zmq frees that of an earlier test in its own time
    engines.bind(endpoint)
    ours.connect(endpoint)
    ready = Ready(LIMITS, model_name="m", dtype="float32", device="cpu", kv_cache_memory=0, seed=0, ranks=())
    client = EngineClient(EngineProcess(ours), ready, Prompts(tiny_tokenizer(), 320, 319, "m"), ServeConfig())
    try:
        yield client, engines
    finally:
        await client.close()
        engines.close()


async def sent_by(choices: list[core.Request]) -> list[Any]:
    """What the engine receives when a request with these choices is submitted."""
    async with connected() as (client, engines):
        client.submit("r", choices)
        return [msgspec.msgpack.decode(await engines.recv()) for _ in choices]


def test_the_engine_gets_no_stop_strings():
    params = DecodingParams(stop=("one", "two"), max_new_tokens=7)
    for message in asyncio.run(sent_by([core.Request("", (1, 2), params)] * 2)):
        assert (message["params"]["stop"], message["params"]["max_new_tokens"]) == ([], 7)


def test_choices_are_planned_and_submitted_without_checking_the_parameters_of_each(monkeypatch: pytest.MonkeyPatch):
    """A thousand checks would keep the event loop for most of a second."""
    checks: list[Mapping[str, Any]] = []

    def check(strategy: type[Any], given: Mapping[str, Any]) -> None:
        checks.append(given)
        check_combinations(strategy, given)

    monkeypatch.setattr(decoding, "check_combinations", check)
    planner = Planner(Prompts(tiny_tokenizer(), 320, 319, "m"), LIMITS, {})
    asked = {"prompt": "a", "n": 4, "seed": 2**63 - 2, "temperature": 1, "stop": "b"}
    choices = read_body(CompletionRequest, json.dumps(asked).encode()).plan(planner)
    messages = asyncio.run(sent_by(choices))
    assert len(checks) == 1
    seeds = [2**63 - 2, 2**63 - 1, -(2**63), -(2**63) + 1]
    assert [choice.params for choice in choices] == [replace(choices[0].params, seed=seed) for seed in seeds]
    expected = [replace(choice.params, stop=()) for choice in choices]
    assert [msgspec.convert(message["params"], DecodingParams) for message in messages] == expected


# ---- /health_generate ------------------------------------------------------------------------------------------------


def update_of(request_id: str, **fields: Any) -> Update:
    return Update(request_id, TokenRun((7,), (0.5,)), 1, 1, 1, 0, 0, **fields)


async def health_generate(num_steps: int, *updates: Update) -> tuple[tuple[int, str] | None, list[str]]:
    """Asks for proof that the engine works, which sends one message, of so many steps.

    Args:
        updates: in the message; the request id "" stands for the one of the token that the engine is asked for.

    Returns:
        Status and code of the refusal if there is one; the types of the messages that the engine gets.
    """
    async with connected() as (client, engines):
        receiving, seeing = asyncio.create_task(client._receive()), asyncio.create_task(see_a_step(client, 0.3))
        messages = [msgspec.msgpack.decode(await engines.recv())]
        sent = [replace(update, request_id=update.request_id or messages[0]["request_id"]) for update in updates]
        await engines.send(msgspec.msgpack.encode(Stepped(sent, replace(client.stats, num_steps=num_steps))))
        (refusal,) = await asyncio.gather(seeing, return_exceptions=True)
        receiving.cancel()
        while await engines.poll(0):
            messages.append(msgspec.msgpack.decode(await engines.recv()))
        assert client.num_running + client.num_waiting == 0
        assert not client.observers
        types = [message["type"] for message in messages]
        if refusal is None:
            return None, types
        assert isinstance(refusal, ApiError), refusal
        return (refusal.status, refusal.code), types


@pytest.mark.parametrize(
    ("num_steps", "updates", "expected", "is_aborted"),
    [
        (1, [update_of("", finish_reason="length")], None, False),
        (1, [update_of("another")], None, True),
        (1, [], None, True),
        (0, [], (503, "service_unavailable"), True),  # a heartbeat
        (1, [update_of("another", finish_reason="error", error="x")], (503, "service_unavailable"), True),
        (1, [update_of("", finish_reason="error", error="not finite")], (500, "engine_error"), False),
    ],
)
def test_health_generate_wants_a_step_that_worked(
    num_steps: int, updates: list[Update], expected: tuple[int, str] | None, is_aborted: bool
):
    refusal, messages = asyncio.run(health_generate(num_steps, *updates))
    assert refusal == expected
    assert messages == ["Request", "Abort"][: 1 + is_aborted]


# ---- what waits ------------------------------------------------------------------------------------------------------


async def send_nothing(message: MutableMapping[str, Any]) -> None:
    raise AssertionError(message)


def test_a_request_that_waits_keeps_no_fields_without_effect(monkeypatch: pytest.MonkeyPatch):
    """Thousands may wait, each with a body of megabytes."""
    parsed: list[weakref.ref[CompletionRequest]] = []

    def read(model: type[CompletionRequest], raw: bytes) -> CompletionRequest:
        asked = read_body(model, raw)
        assert "user" not in asked.model_dump()
        parsed.append(weakref.ref(asked))
        return asked

    monkeypatch.setattr(answering, "read_body", read)

    async def run() -> None:
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        messages.put_nowait({"type": "http.request", "body": json.dumps({"prompt": "a", "user": "u" * 1000}).encode()})
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "state": {"request_id": "1"}}
        request = requests.Request(scope, messages.get)
        async with connected() as (client, engines):
            intake = Intake(10**6)
            endpoint = Endpoint([ServedModel(client)], intake, client.config)
            response = await endpoint.answer(request, CompletionRequest)
            await engines.recv()
            for _ in range(500):  # the thread that parsed the body lets go of it in its own time
                if parsed[0]() is None:
                    break
                await asyncio.sleep(0.01)
            assert [asked() for asked in parsed] == [None]
            messages.put_nowait({"type": "http.disconnect"})
            with pytest.raises(ClientDisconnect):
                await response(scope, messages.get, send_nothing)
            await intake.close()

    asyncio.run(run())


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_a_profile_is_ended_with_the_server_unless_the_engine_hangs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linked, "LAST_PROFILE_TIME", 0.05)

    async def run(hangs: bool) -> list[str]:
        async with connected() as (client, engines):
            client._watcher = asyncio.create_task(client._receive())
            starting = asyncio.create_task(client.start_profile("name", [0], 0, 5))
            seen = [msgspec.msgpack.decode(await engines.recv())["type"]]
            await engines.send(encode_message(Profiled()))
            await starting
            draining = asyncio.create_task(client.drain(0.0))
            seen.append(msgspec.msgpack.decode(await engines.recv())["type"])
            if not hangs:
                await engines.send(encode_message(Profiled(["trace"])))
            await asyncio.wait_for(draining, 10)
            return seen

    for hangs in (False, True):
        assert asyncio.run(run(hangs)) == ["StartProfile", "StopProfile"]
