"""How fine streams are: --stream-block-size."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ServerProcess, running
from tests.e2e.serving import events

FIELDS: dict[str, Any] = {"max_tokens": 64, "ignore_eos": True}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Tom has 3 boxes"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Tom has 3 boxes"}]},
    "/v1/responses": {"input": "Tom has 3 boxes"},
}


@pytest.fixture(scope="module")
def fine(model_dir: Path) -> Iterator[ServerProcess]:
    with running("--model", str(model_dir), "--stream-block-size", "8") as server:
        yield server


def pieces(server: ServerProcess, route: str, **fields: Any) -> list[str]:
    """The pieces of text of a stream."""
    answer = server.http.post(route, json={**ASKED[route], **FIELDS, "stream": True, **fields})
    assert answer.headers["x-accel-buffering"] == "no"  # a proxy that keeps the beginning would hold back the stream
    data = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    if route == "/v1/responses":
        return [event["delta"] for event in data if event["type"] == "response.output_text.delta"]
    choices = [choice for chunk in data for choice in chunk["choices"]]
    texts = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]
    return [text for text in texts if text]


def whole(server: ServerProcess, route: str, **fields: Any) -> str:
    """The text of the same request without a stream."""
    answer = server.http.post(route, json={**ASKED[route], **FIELDS, **fields}).json()
    if route == "/v1/responses":
        return str(answer["output"][0]["content"][0]["text"])
    (choice,) = answer["choices"]
    return str(choice.get("text") or choice["message"]["content"])


@pytest.mark.parametrize("route", ASKED)
def test_streams_have_small_blocks_unless_they_name_their_own(fine: ServerProcess, route: str):
    default = pieces(fine, route)
    assert len(default) >= 4
    assert "".join(default) == whole(fine, route, block_size=8)
    own = pieces(fine, route, block_size=32)
    assert len(own) < len(default)
    assert "".join(own) == whole(fine, route) == whole(fine, route, block_size=32)
    assert "".join(own) != "".join(default), "the test needs a prompt whose text depends on the block size"


def test_diffusion_streams_keep_the_servers_block_size(fine: ServerProcess):
    start = events(fine.http.post("/v1/diffusion/completions", json={"prompt": "x", "max_tokens": 4}).text)[0]
    assert start["block_size"] == 32
    info = fine.http.get("/server_info").json()
    assert (info["server"]["stream_block_size"], info["decoding"]["block_size"]) == (8, 32)


def test_without_the_flag_a_stream_has_the_servers_blocks(server: ServerProcess):
    for route in ASKED:
        assert "".join(pieces(server, route)) == whole(server, route)
