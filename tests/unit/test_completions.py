"""Chunks of a stream against the whole response, for every text and every way of cutting it into updates."""

import asyncio
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from lopa_ascend.config import DecodingParams
from lopa_ascend.core import Request
from lopa_ascend.serve.api.answer import AnswerForm, CompletionWriter, Details
from lopa_ascend.serve.api.chat import CHAT
from lopa_ascend.serve.api.completions import COMPLETION
from lopa_ascend.serve.api.logprobs import LOWEST, TokenProbs, escaped
from lopa_ascend.serve.endpoint import PIECE, encoded
from lopa_ascend.text.output_stream import OutputStream
from lopa_ascend.text.tokenizer import Tokenizer
from lopa_ascend.text.tokenizer_files import load_tokenizer
from lopa_ascend.types import GenerationOutput, Progress, TokenRun, Update
from tests.tiny import VOCAB_SIZE, write_tokenizer

TEXTS = ["größer als 5 €?", "日本語のテキスト", "🙂🙃 emoji é", "line\nbreak \u2028 \x85", "hello hello", " the answer"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    tokenizer = load_tokenizer(path, VOCAB_SIZE)
    assert tokenizer is not None
    return tokenizer


def updates_of(ids: list[int], cuts: list[int], params: DecodingParams) -> list[Update]:
    """The tokens in as many updates as there are cuts, and one more; some are empty."""
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    updates = []
    for number, (start, end) in enumerate(zip(edges, edges[1:], strict=False), 1):
        probs = tuple((1 + position % 7) / 8 for position in range(start, end))
        reason = "length" if number == len(edges) - 1 else None
        updates.append(Update("r", TokenRun(tuple(ids[start:end]), probs), number, end, 9, 0, 0, finish_reason=reason))
    return updates


def run(ids: list[int], cuts: list[int], params: DecodingParams, tokenizer: Tokenizer) -> list[tuple[Update, Progress]]:
    stream, steps = OutputStream([1, 2], params, tokenizer), []
    for update in updates_of(ids, cuts, params):
        output = stream.push(update)
        steps.append((update, stream.progress))
        if output is not None:
            return steps
    raise AssertionError("the last update ends the request")


def text_of(choice: dict[str, Any]) -> str:
    part = choice.get("delta", choice.get("message", choice))
    return str(part.get("content", part.get("text", "")))


def joined(chunks: list[dict[str, Any]]) -> tuple[str, list[int], list[Any], Any]:
    """Text, token ids, logprobs and the end of the only choice of a stream."""
    text = ""
    ids: list[int] = []
    probs: list[Any] = []
    ends: list[Any] = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert not ends, "something came after the finish chunk"
        text += text_of(choice)
        ids += choice.get("token_ids", [])
        probs += listed(choice["logprobs"])
        if choice["finish_reason"] is not None:
            ends.append((choice["finish_reason"], choice["stop_reason"]))
    (end,) = ends
    return text, ids, probs, end


def listed(logprobs: dict[str, Any] | None) -> list[Any]:
    """One item a token, of either shape."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    return list(zip(*(logprobs[name] for name in ("tokens", "token_logprobs", "text_offset")), strict=True))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], str, list[int], list[str], int, str]:
    ids = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30))
    text = draw(st.sampled_from(TEXTS) | st.text(max_size=12))
    cuts = draw(st.lists(st.integers(0, 60), max_size=12))
    stop = draw(st.lists(st.text(min_size=1, max_size=4), max_size=3))
    return ids, text, cuts, stop, draw(st.integers(0, 8)), draw(st.sampled_from(["", "a", "the end"]))


@pytest.mark.parametrize("form", [COMPLETION, CHAT])
@pytest.mark.parametrize("logprobs", [None, 0, 1])
@given(case=cases(), pick=st.integers(0, 100))
def test_chunks_join_to_the_whole(form: AnswerForm, logprobs: int | None, tokenizer: Tokenizer, case: Any, pick: int):
    ids, text, cuts, stop, min_new_tokens, echoed = case
    ids = ids[: pick % 31] + tokenizer.encode(text) + ids[pick % 31 :]
    if not ids:
        return
    plain = tokenizer.decode(ids)
    inside = plain[pick % (len(plain) + 1) :][:3]
    stops = tuple({*stop, inside} - {""})
    params = DecodingParams(stop=stops, min_new_tokens=min(min_new_tokens, len(ids)), max_new_tokens=len(ids))
    details = Details(
        with_ids=True, logprobs=logprobs, echoed=[echoed] if form is COMPLETION else (), include_usage=True
    )
    response = CompletionWriter(form, "m", [Request("", (1, 2), params)], details, tokenizer)
    chunks = response.opening()
    steps = run(ids, cuts, params, tokenizer)
    for update, progress in steps:
        chunks += response.events(0, update, progress)
    output, alone = steps[-1][1].output, run(ids, [], params, tokenizer)[-1][1].output
    assert output is not None
    assert alone is not None
    assert (output.text, output.token_ids, output.stop_reason) == (alone.text, alone.token_ids, alone.stop_reason)
    (choice,) = response.whole([output])["choices"]
    expected = (choice["finish_reason"], choice["stop_reason"])
    assert joined(chunks) == (text_of(choice), choice["token_ids"], listed(choice["logprobs"]), expected)
    assert len(listed(choice["logprobs"])) == (0 if logprobs is None else len(output.token_ids))
    (last,) = response.closing()
    assert last["usage"] == response.whole([output])["usage"]


def test_the_role_of_a_chat_comes_with_the_first_text(tokenizer: Tokenizer):
    """Clients take the time of the first chunk as that of the first token."""
    params = DecodingParams(max_new_tokens=3)
    writer = CompletionWriter(CHAT, "m", [Request("", (1, 2), params)] * 2, Details(n=2), tokenizer)
    chunks = writer.opening()
    assert chunks == []
    nothing = Update("r", TokenRun(), 1, 1, 9, None, 0)
    assert writer.events(0, nothing, Progress(TokenRun(), "")) == []
    for index in (1, 0):
        for update, progress in run([65, 66, 67], [1, 2], params, tokenizer):
            chunks += writer.events(index, update, progress)
    roles = [chunk["choices"][0]["index"] for chunk in chunks if "role" in chunk["choices"][0]["delta"]]
    assert roles == [0, 1]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["index"] for chunk in chunks[:3]] == [0, 1, 1]
    assert chunks[2]["choices"][0]["delta"]["content"]


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2, 1), (2, 1, 0)])
def test_openais_client_reads_choices_that_come_in_any_order(order: tuple[int, ...], tokenizer: Tokenizer):
    params = DecodingParams(max_new_tokens=3)
    writer = CompletionWriter(CHAT, "m", [Request("", (1, 2), params)] * 3, Details(n=3), tokenizer)
    state = ChatCompletionStreamState()
    for index in order:
        for update, progress in run([65 + index, 66, 67], [1, 2], params, tokenizer):
            for chunk in writer.events(index, update, progress):
                list(state.handle_chunk(ChatCompletionChunk.model_validate(chunk)))
    texts = [choice.message.content for choice in state.current_completion_snapshot.choices]
    assert texts == [tokenizer.decode([65 + index, 66, 67]) for index in range(3)]


@given(ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=20))
def test_offsets_and_bytes(tokenizer: Tokenizer, ids: list[int]):
    tokens = TokenProbs(tokenizer).push(TokenRun(tuple(ids), (0.5,) * len(ids)))
    visible = [token for token in ids if not tokenizer.is_special(token)]
    pieces = b"".join(item.data or b"" for item, token in zip(tokens, ids, strict=True) if token in visible)
    assert pieces.decode(errors="replace") == tokenizer.decode(ids)
    offsets = [item.offset for item in tokens]
    assert offsets == sorted(offsets)
    assert all(offset <= len(tokenizer.decode(ids[:place])) for place, offset in enumerate(offsets))
    text = tokenizer.encode("hello é")
    for place, item in enumerate(TokenProbs(tokenizer).push(TokenRun(tuple(text), (1.0,) * len(text)))):
        assert (item.offset, item.logprob) == (len(tokenizer.decode(text[:place])), 0.0)


def test_probabilities_without_a_tokenizer_or_of_zero():
    one, none = TokenProbs(None).push(TokenRun((7, 8), (0.25, 0.0)))
    assert (one.token, one.data, one.logprob) == ("token_id:7", None, math.log(0.25))
    assert none.logprob == LOWEST
    assert one.chat() == {"token": "token_id:7", "logprob": math.log(0.25), "bytes": None}


@pytest.mark.parametrize("top_p", [None, 0.5])
def test_the_list_of_probable_tokens_is_of_one_distribution(top_p: float | None):
    choice = Request("", (1, 2), DecodingParams(temperature=1.0, top_p=top_p, top_logprobs=2))
    ranked = (((8, 0.5), (7, 0.3)), ((8, 0.5), (6, 0.3)))
    output = GenerationOutput((1, 2), TokenRun((7, 7), (0.9, 0.9), ranked), None, "length", None, 1, 2, 2)
    listed = 0.9 if top_p is None else 0.3
    chat, completion = (
        next(CompletionWriter(form, "m", [choice], Details(logprobs=2)).whole([output])["choices"])["logprobs"]
        for form in (CHAT, COMPLETION)
    )
    first, second = chat["content"]
    assert first["logprob"] == second["logprob"] == math.log(0.9)
    assert [math.exp(top["logprob"]) for top in first["top_logprobs"]] == pytest.approx([0.5, listed])
    assert [math.exp(top["logprob"]) for top in second["top_logprobs"]] == pytest.approx([0.5, 0.3])
    assert completion["token_logprobs"] == [math.log(0.9)] * 2
    expected = [
        {"token_id:8": math.log(0.5), "token_id:7": math.log(listed)},
        {"token_id:8": math.log(0.5), "token_id:6": math.log(0.3), "token_id:7": math.log(0.9)},
    ]
    assert completion["top_logprobs"] == expected


def test_every_token_has_a_name_of_its_own(tokenizer: Tokenizer):
    """Also those that are a part of a character, or no text at all."""
    ids = range(VOCAB_SIZE + 3)
    choice = Request("", (1, 2), DecodingParams(top_logprobs=20))
    ranked = tuple((token, 1 / (2 + token)) for token in ids)
    output = GenerationOutput((1, 2), TokenRun((7,), (1 / 9,), (ranked,)), None, "length", None, 1, 2, 2)
    chat, completion = (
        next(CompletionWriter(form, "m", [choice], Details(logprobs=9), tokenizer).whole([output])["choices"])[
            "logprobs"
        ]
        for form in (CHAT, COMPLETION)
    )
    assert list(completion["top_logprobs"][0].values()) == [math.log(prob) for _, prob in ranked]
    top = chat["content"][0]["top_logprobs"]
    assert len({item["token"] for item in top}) == len(ids)
    names = dict(zip(ids, completion["top_logprobs"][0], strict=True))
    first, last = tokenizer.encode("\U0001f642")[0], VOCAB_SIZE + 2
    assert (names[first], top[first]["token"]) == (r"bytes:\xf0\x9f", r"\xf0\x9f")
    assert (names[last], top[last]["bytes"]) == (f"token_id:{last}", [])
    assert [bytes(item["bytes"]) for item in top] == [tokenizer.piece(token) for token in ids]


@pytest.mark.parametrize(
    ("piece", "name"), [(b" \xf0\x9f", r" \xf0\x9f"), (b"\\xf0\xf0", r"\x5cxf0\xf0"), (b"\xff", r"\xff")]
)
def test_bytes_are_written_so_that_they_can_be_read_back(piece: bytes, name: str):
    assert escaped(piece) == name
    assert name.encode().decode("unicode_escape").encode("latin-1") == piece


def test_usage_counts_a_prompt_once(tokenizer: Tokenizer):
    params = DecodingParams(max_new_tokens=3)
    outputs = [run([65, 66, 67], [1], params, tokenizer)[-1][1].output for _ in range(4)]
    choices = [Request("", tuple([1] * size), params) for size in (5, 5, 7, 7)]
    whole = CompletionWriter(COMPLETION, "m", choices, Details(n=2, echoed=["A", "B"])).whole([o for o in outputs if o])
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (12, 12)
    assert whole["lopa"] == {"num_forwards": 8, "tokens_per_forward": 1.5}
    assert [choice["text"][0] for choice in whole["choices"]] == ["A", "A", "B", "B"]


def test_a_long_answer_is_encoded_beside_the_event_loop():
    """Other requests are answered while one with many choices becomes JSON."""
    choices = [Request("", (1, 2), DecodingParams())] * 16
    response = CompletionWriter(COMPLETION, "m", choices, Details(n=16, logprobs=1))
    output = GenerationOutput((1, 2), TokenRun((7,) * 800, (0.5,) * 800), "é" * 800, "length", None, 1, 800, 800)

    async def run() -> tuple[list[bytes], float, float]:
        gaps, start = [0.0], time.monotonic()
        encoding = asyncio.create_task(asyncio.to_thread(encoded, response, [output] * 16))
        while not encoding.done():
            before = time.monotonic()
            await asyncio.sleep(0.001)
            gaps.append(time.monotonic() - before)
        return await encoding, max(gaps), time.monotonic() - start

    parts, worst, whole = asyncio.run(run())
    assert worst < whole / 2
    assert max(map(len, parts)) < 2 * PIECE
    answer, expected = json.loads(b"".join(parts)), response.whole([output] * 16)
    assert answer == json.loads(json.dumps({**expected, "choices": list(expected["choices"])}))
    assert len(answer["choices"]) == 16
