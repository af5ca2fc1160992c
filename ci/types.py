"""Lists the types that a request passes through: the classes of ours of which one request makes objects.

    python -m ci.types

Two requests are traced, both to the bundled model and for greedy LoPA with lookahead branches, so without penalties and
sampling:

- ``LLM.generate``, from the call to its output, by eager steps and by compiled ones;
- "http": a streamed chat completion with a JSON schema, from its connection to the last chunk. The HTTP server and the
  engine have a thread each of this process, with the messages of the server's two processes between them.

Every class of ``lopa_ascend`` counts that is instantiated on the way, whether it is plain data or not: also the models
of pydantic that a body is read into, and the messages that travel between the processes. Not counted is what exists
before the request (the engine, its executors and settings, the routes), what the ops of a CPU make for themselves, and
what a compiled step makes while it is compiled: a graph only computes. A schema is compiled and a template rendered in
processes of their own, whose classes do not count either.
"""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from unittest.mock import patch

import msgspec
import uvicorn
import zmq.asyncio
from pydantic import BaseModel

from lopa_ascend.backend.compiler import Eager
from lopa_ascend.config import EngineConfig
from lopa_ascend.graph import setup
from lopa_ascend.graph.step import DecodeStep
from lopa_ascend.llm import LLM
from lopa_ascend.serve.app import create_app
from lopa_ascend.serve.config import ServeConfig
from lopa_ascend.serve.link import process
from lopa_ascend.serve.link.client import EngineClient
from lopa_ascend.serve.link.messages import Ready, Start
from lopa_ascend.serve.link.spawn import EngineProcess
from lopa_ascend.serve.server import _uvicorn, bind, listen

MOST = {"eager": 31, "graph": 41, "http": 57}
"""The most types, by the kind of the steps or "http"."""
PROMPT = "What is 7 times 8, and then 12 more?"
UNCOUNTED = "lopa_ascend.backend.cpu."
COMPILED = DecodeStep.__call__.__code__


@dataclass
class Trace:
    """The classes of ``lopa_ascend`` of which objects are made while it runs, in all threads that begin after it."""

    made: set[type] = field(default_factory=set)
    is_on: bool = False
    _in_graph: bool = False
    _known: dict[int, object] = field(default_factory=dict)
    """By id what has been looked at, and what was there before."""

    def run(self, request: Callable[[], object]) -> None:
        """Traces a request."""
        self._known = {id(value): value for value in gc.get_objects()}
        self.is_on = True
        try:
            request()
        finally:
            self.is_on = False
            self._known.clear()

    def __call__(self, frame: FrameType, event: str, value: object) -> None:
        code = frame.f_code
        if code is COMPILED and event in ("call", "return"):
            self._in_graph = event == "call"
        if not self.is_on or self._in_graph:
            return
        if event == "return":
            self._find([value])
        if event != "call":
            return
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if code.co_name == "__init__":
            self.made.add(type(first))
        elif code.co_varnames[:1] == ("_cls",):  # of a NamedTuple
            assert isinstance(first, type)
            self.made.add(first)
        else:
            self._find(frame.f_locals.values())

    def _find(self, values: Iterable[object]) -> None:
        """Adds what msgspec and pydantic have made: both call no Python."""
        for value in values:
            if isinstance(value, msgspec.Struct | BaseModel) and id(value) not in self._known:
                self._known[id(value)] = value
                self.made.add(type(value))
                fields = value.__struct_fields__ if isinstance(value, msgspec.Struct) else type(value).model_fields
                self._find(getattr(value, name) for name in fields)
            elif isinstance(value, list | tuple):
                self._find(value)

    @property
    def names(self) -> list[str]:
        names = sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in self.made)
        return [name for name in names if name.startswith("lopa_ascend.") and not name.startswith(UNCOUNTED)]


def types_of(kind: str) -> list[str]:
    """The types of a request by name.

    Args:
        kind: one of ``MOST``.
    """
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        if kind == "http":
            asyncio.run(_trace_http(trace))
        else:
            _trace_library(trace, kind)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return trace.names


def _trace_library(trace: Trace, kind: str) -> None:
    # On a CPU a graph is the step as it is, so that nothing must be compiled.
    with patch.object(setup, "load_compiler", lambda *_, **__: Eager()):
        llm = LLM(graph_mode="inductor" if kind == "graph" else "eager", max_model_len=512, max_num_seqs=1)
    params = llm.params(max_new_tokens=96)
    llm.generate("An earlier request", params, quiet=True)  # what is made once and kept
    trace.run(lambda: llm.generate(PROMPT, params, quiet=True))
    assert llm.engine.stats().num_steps > 1


class EngineThread(EngineProcess):
    """The way to an engine in a thread, which runs what its process would."""

    async def wait(self) -> None:
        await asyncio.Event().wait()


def _serve_engine(socket: zmq.Socket[bytes]) -> None:
    with socket, suppress(zmq.ContextTerminated):
        engine = process._load(socket)
        assert engine is not None
        process._serve(engine, socket)


async def _trace_http(trace: Trace) -> None:
    context = zmq.asyncio.Context()
    ours, engines = context.socket(zmq.PAIR), zmq.Context(context).socket(zmq.PAIR)
    ours.bind("inproc://engine")
    engines.connect("inproc://engine")
    threading.Thread(target=_serve_engine, args=(engines,), daemon=True).start()
    config = ServeConfig(engine=EngineConfig(max_model_len=512, max_num_seqs=1), host="127.0.0.1", port=0)
    engine = EngineThread(ours)
    engine.send(Start(config.engine))
    ready = await engine.receive()
    assert isinstance(ready, Ready)
    client = await EngineClient.connect(engine, ready, config, None)
    listener = bind(config)
    app = create_app([client], config.host)
    server = uvicorn.Server(_uvicorn(config, app))
    serving = asyncio.create_task(server.serve([listener]))
    listen(listener, config)
    port = listener.getsockname()[1]
    await asyncio.to_thread(_ask, port, "An earlier request", "text")
    await asyncio.to_thread(trace.run, lambda: _ask(port, PROMPT, "answer"))
    server.should_exit = True
    await serving
    await app.state.intake.close()
    await client.close()
    context.term()


def _ask(port: int, prompt: str, field: str) -> None:
    """Reads the answer to a streamed chat completion, an object with one field."""
    schema = {"type": "object", "properties": {field: {"type": "integer"}}, "required": [field]}
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "max_tokens": 96,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read().decode()
    assert answer.status == 200, text
    assert text.endswith("data: [DONE]\n\n"), text


def main() -> int:
    """Prints the types and their numbers; 1 if there are too many."""
    status = 0
    for kind, most in MOST.items():
        names = types_of(kind)
        print(f"{kind}: {len(names)} types (at most {most})", *names, sep="\n  ")
        status |= len(names) > most
    return status


if __name__ == "__main__":
    sys.exit(main())
