"""/v1/completions as its clients see it; what it shares with the chat endpoint is tested here."""

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.serve.api.completions import Completion
from tests.e2e.conftest import ServerProcess
from tests.e2e.serving import PROMPTS, complete, events, streamed, text_of, whole


def test_same_output_as_the_python_api(server: ServerProcess, model_dir: Path):
    llm = LLM(model_dir)
    for params in (DecodingParams(max_new_tokens=24), DecodingParams(max_new_tokens=24, temperature=1.0, seed=3)):
        outputs = llm.generate(PROMPTS, params, quiet=True)
        fields = {"max_tokens": 24, "temperature": params.temperature, "seed": params.seed}
        response = complete(server.openai, PROMPTS, return_token_ids=True, **fields)
        assert [choice.text for choice in response.choices] == [output.text for output in outputs]
        assert [tuple(choice.token_ids) for choice in response.choices] == [output.token_ids for output in outputs]
        assert response.usage.completion_tokens == sum(len(output.token_ids) for output in outputs)
        assert response.usage.prompt_tokens == sum(len(output.prompt_token_ids) for output in outputs)
        assert response.lopa["num_forwards"] == sum(output.num_forwards for output in outputs)


@pytest.mark.parametrize(("temperature", "prompts"), [(0.0, PROMPTS[::2]), (1.0, PROMPTS[1::2])])
def test_stream_equals_whole(client: Any, temperature: float, prompts: list[str]):
    for prompt in prompts:
        fields = {"max_tokens": 32, "temperature": temperature, "seed": 1}
        assert streamed(complete(client, prompt, stream=True, **fields)) == whole(complete(client, prompt, **fields))
        chat = {"model": "tiny", "messages": [{"role": "user", "content": prompt}], **fields}
        chunks = list(client.chat.completions.create(**chat, stream=True))
        assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "")
        assert streamed(chunks) == whole(client.chat.completions.create(**chat))


def test_stop_strings_across_chunks(client: Any):
    fields = {"max_tokens": 40, "temperature": 1.0, "seed": 2}
    text = complete(client, "go", ignore_eos=True, **fields).choices[0].text
    for start in range(5, len(text) - 4, 9):
        stop = [text[start : start + 4], "never there", *map(str, range(90000, 90006))]
        asked = {"stop": stop, "ignore_eos": True, **fields}
        expected = (text[: text.index(stop[0])], "stop", stop[0])
        assert whole(complete(client, "go", **asked)) == {0: expected}
        assert streamed(complete(client, "go", stream=True, **asked)) == {0: expected}


def test_several_choices(client: Any):
    same = complete(client, ["a", "b"], n=2, max_tokens=12)
    texts = [choice.text for choice in same.choices]
    assert [choice.index for choice in same.choices] == [0, 1, 2, 3]
    assert texts == [text for p in ("a", "b") for text in 2 * [complete(client, p, max_tokens=12).choices[0].text]]
    sampled = {"max_tokens": 12, "temperature": 1.0}
    several = complete(client, "a", n=3, seed=-2, **sampled)
    singles = [complete(client, "a", seed=seed, **sampled).choices[0].text for seed in (-2, -1, 0)]
    assert [choice.text for choice in several.choices] == singles
    assert len(set(singles)) == 3
    assert streamed(complete(client, "a", n=3, seed=-2, stream=True, **sampled)) == whole(several)


def test_token_id_prompts_and_switched_off_sampling(client: Any):
    ids = [[1, 2, 3], [4, 5]]
    both = whole(complete(client, ids, max_tokens=9, top_p=1, top_k=-1))
    assert both == whole(complete(client, ids, max_tokens=9, top_p=0.5, top_k=3, temperature=1e-6))
    assert both == whole(complete(client, ids, max_tokens=9, top_p=0.5))
    assert both[0] == whole(complete(client, ids[0], max_tokens=9, top_k=0))[0]
    assert both[1] == whole(complete(client, ids[1:], max_tokens=9, temperature=0))[0]


def test_exact_lengths(client: Any):
    for fields in ({"ignore_eos": True}, {"min_tokens": 17}):
        response = complete(client, "a", max_tokens=17, **fields)
        assert (response.usage.completion_tokens, response.choices[0].finish_reason) == (17, "length")


def test_usage_in_streams(client: Any):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(complete(client, ["a", "b"], max_tokens=12, ignore_eos=True, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert (chunks[-1].choices, counts[-1]) == ([], 24)
    assert chunks[-1].lopa["num_forwards"] > 0
    chunks = list(complete(client, "a", max_tokens=4, stream=True, stream_options={"include_usage": True}))
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_echo(client: Any):
    plain = whole(complete(client, "größer", max_tokens=9))
    assert whole(complete(client, "größer", max_tokens=9, echo=True)) == {0: ("größer" + plain[0][0], *plain[0][1:])}
    fields: dict[str, Any] = {"max_tokens": 9, "echo": True, "n": 2}
    answer = whole(complete(client, [[65, 66], [67]], **fields))
    assert streamed(complete(client, [[65, 66], [67]], stream=True, **fields)) == answer
    begins = {text[:1] for text, *_ in (answer[0], answer[1])}, {text[:1] for text, *_ in (answer[2], answer[3])}
    assert [len(begin) for begin in begins] == [1, 1]
    assert begins[0] != begins[1]


@pytest.mark.parametrize("top", [0, 4])
def test_logprobs(client: Any, top: int):
    for temperature in (0.0, 1.0):
        fields = {"max_tokens": 16, "ignore_eos": True, "temperature": temperature, "seed": 1, "logprobs": top}
        choice = complete(client, "größer", **fields).choices[0]
        probs = choice.logprobs
        assert len(probs.tokens) == len(probs.token_logprobs) == len(probs.text_offset) == 16
        assert all(-20 < value <= 0 for value in probs.token_logprobs)
        assert max(map(math.exp, probs.token_logprobs)) > 0.05
        if top:
            assert all(1 <= len(values) <= top + 1 for values in probs.top_logprobs)
            own = zip(probs.tokens, probs.token_logprobs, probs.top_logprobs, strict=True)
            assert all(values[token] == value for token, value, values in own)
        else:
            assert probs.top_logprobs is None
        parts = [chunk.choices[0] for chunk in complete(client, "größer", stream=True, **fields)]
        assert "".join(text_of(part) for part in parts) == choice.text
        shown = [part.logprobs for part in parts if part.logprobs]
        assert [value for part in shown for value in part.token_logprobs] == probs.token_logprobs
        assert [value for part in shown for value in part.text_offset] == probs.text_offset


def test_clients_at_once(client: Any):
    def ask(prompt: str, stream: bool):
        answer = complete(client, prompt, max_tokens=24, stream=stream)
        return streamed(answer) if stream else whole(answer)

    expected = [ask(prompt, False) for prompt in PROMPTS]
    with ThreadPoolExecutor(2 * len(PROMPTS)) as pool:
        answers = [pool.submit(ask, prompt, stream) for stream in (False, True) for prompt in PROMPTS]
    assert [answer.result() for answer in answers] == expected + expected


def test_async_client(server: ServerProcess):
    asked: Any = {"model": "tiny", "prompt": "a", "max_tokens": 32}
    asked_chat: Any = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 32}

    async def ask() -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def completion() -> tuple[str, str]:
                parts = [part async for part in await client.completions.create(**asked, stream=True)]
                answer = await client.completions.create(**asked)
                return "".join(text_of(choice) for part in parts for choice in part.choices), text_of(answer.choices[0])

            async def chat() -> tuple[str, str]:
                create = client.chat.completions.create
                parts = [part async for part in await create(**asked_chat, stream=True)]
                answer = await create(**asked_chat)
                return "".join(text_of(choice) for part in parts for choice in part.choices), text_of(answer.choices[0])

            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("other")
            return list(await asyncio.gather(*(ask() for ask in (completion, chat) * 4)))

    answers = asyncio.run(ask())
    assert len(answers) == 8
    assert all(joined == text for joined, text in answers)


def test_shape(server: ServerProcess):
    strict = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True)
    completion = strict.completions.create(model="tiny", prompt="a", max_tokens=4, logprobs=1)
    Completion.model_validate(completion.model_dump(exclude_unset=True))
    body = {"prompt": "a", "max_tokens": 4, "stream": True, "temperature": 0.0}
    ids = {event["id"] for event in events(server.http.post("/v1/completions", json=body).text)}
    assert len(ids) == 1
    assert ids.pop().startswith("cmpl-")
