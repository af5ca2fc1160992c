"""How fine streams are, and that they say the same as answers in one piece."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ServerProcess, running

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


# ---- comments --------------------------------------------------------------------------------------------------------

DIFFUSION = {f"/v1/diffusion/{route}": ASKED[f"/v1/{route}"] for route in ("completions", "chat/completions")}
COMMENT = ": keep-alive"


@pytest.fixture(scope="module")
def impatient(model_dir: Path) -> Iterator[ServerProcess]:
    """A server that runs one request at a time, and whose streams are never silent for long."""
    with running("--model", str(model_dir), "--keep-alive-interval", "0.02", "--max-num-seqs", "1") as server:
        yield server


def lines_of(server: ServerProcess, route: str, **fields: Any) -> list[str]:
    body = {**(ASKED | DIFFUSION)[route], **FIELDS, "stream": True, **fields}
    return server.http.post(route, json=body).text.split("\n")


def texts_of(lines: list[str]) -> str:
    return "".join(re.findall(r'"(?:text|delta|content)":"((?:[^"\\]|\\.)*)"', "".join(lines)))


@pytest.mark.parametrize("route", [*ASKED, *DIFFUSION])
def test_a_stream_that_waits_has_comments_which_change_no_event(
    server: ServerProcess, impatient: ServerProcess, route: str
):
    slow = {"prompt": "x", "max_tokens": 64, "ignore_eos": True, "decoding": "vanilla", "stream": True}
    with impatient.http.stream("POST", "/v1/completions", json=slow) as before:
        assert before.status_code == 200
        lines = lines_of(impatient, route)  # it waits in the queue
    first_text = next(number for number, line in enumerate(lines) if re.search('"(text|delta|content)":"[^"]', line))
    assert COMMENT in lines[:first_text]
    assert all(lines[number + 1] == "" for number, line in enumerate(lines) if line == COMMENT)
    silent = lines_of(server, route)
    assert COMMENT not in silent  # after 15 s
    assert texts_of(lines) == texts_of(silent)  # in more or fewer pieces, by how busy the machine is


def test_clients_read_streams_with_comments(impatient: ServerProcess):
    fields = {"decoding": "vanilla", "steps": 32}
    chunks = list(
        impatient.openai.chat.completions.create(
            model="default", messages=[{"role": "user", "content": "hi"}], max_tokens=32, stream=True, extra_body=fields
        )
    )
    assert chunks[-1].choices[0].finish_reason
    with impatient.openai.responses.stream(
        model="default", input="hi", max_output_tokens=32, extra_body=fields
    ) as stream:
        assert list(stream)[-1].type in ("response.completed", "response.incomplete")


def test_a_client_that_leaves_during_the_silence_ends_its_request(impatient: ServerProcess):
    slow = {"prompt": "x", "max_tokens": 1024, "ignore_eos": True, "decoding": "vanilla", "stream": True}
    before = len(impatient.stderr.seen)
    with impatient.http.stream("POST", "/v1/completions", json=slow) as first:
        with impatient.http.stream("POST", "/v1/completions", json=slow) as waiting:
            assert COMMENT in waiting.iter_lines()
        assert COMMENT in first.iter_lines()
    deadline = time.monotonic() + 30
    while len(ends := [json.loads(line) for line in impatient.stderr.seen[before:] if '"finished"' in line]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [end["finish_reason"] for end in ends] == ["abort"] * 2
