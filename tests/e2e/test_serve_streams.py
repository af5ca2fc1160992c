"""How fine streams are, and that they say the same as answers in one piece."""

import json
from typing import Any

import pytest

from tests.e2e.conftest import ServerProcess

FIELDS: dict[str, Any] = {"max_tokens": 64, "ignore_eos": True}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Tom has 3 boxes"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Tom has 3 boxes"}]},
    "/v1/responses": {"input": "Tom has 3 boxes"},
}


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
def test_smaller_blocks_give_finer_pieces_of_the_same_text_as_a_whole_answer(server: ServerProcess, route: str):
    fine, coarse = (pieces(server, route, block_size=size) for size in (8, 32))
    assert len(fine) >= 4
    assert len(coarse) < len(fine)
    assert "".join(fine) == whole(server, route, block_size=8)
    assert "".join(coarse) == whole(server, route, block_size=32) == whole(server, route)
    assert "".join(coarse) != "".join(fine), "the test needs a prompt whose text depends on the block size"
