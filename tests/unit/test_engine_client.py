"""The client of the engine, with a socket in place of the engine process."""

import asyncio
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from lopa_ascend.config import DecodingParams, Limits
from lopa_ascend.serve.engine.client import Choice, ClientSettings, EngineClient
from lopa_ascend.serve.engine.messages import Ready
from lopa_ascend.serve.engine.process import EngineProcess
from lopa_ascend.text.prompt import Prompts
from tests.tiny import tiny_tokenizer

LIMITS = Limits(
    vocab_size=320,
    mask_token_id=319,
    max_model_len=500,
    num_pages=100,
    max_num_seqs=4,
    max_num_batched_tokens=600,
    max_prefill_tokens=1024,
    max_num_branches=15,
)


async def sent_by(choices: list[Choice]) -> list[Any]:
    """What the engine receives when a request with these choices is submitted."""
    context = zmq.asyncio.Context.instance()
    ours, engines = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    engines.bind("inproc://engine")
    ours.connect("inproc://engine")
    ready = Ready(LIMITS, model_name="m", dtype="float32", device="cpu", kv_cache_memory=0, seed=0, ranks=())
    client = EngineClient(EngineProcess(ours), ready, Prompts(tiny_tokenizer(), 320, 319, "m"), ClientSettings())
    try:
        client.submit("r", choices)
        return [msgspec.msgpack.decode(await engines.recv()) for _ in choices]
    finally:
        await client.close()
        engines.close()


def test_the_engine_gets_no_stop_strings():
    params = DecodingParams(stop=("one", "two"), max_new_tokens=7)
    for message in asyncio.run(sent_by([Choice([1, 2], params)] * 2)):
        assert (message["params"]["stop"], message["params"]["max_new_tokens"]) == ([], 7)
