"""/v1/chat/completions, where it differs from /v1/completions."""

from pathlib import Path
from typing import Any

import openai
import pytest

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.serve.api.chat import ChatCompletion
from tests.e2e.conftest import ServerProcess
from tests.e2e.serving import streamed, text_of, whole

MESSAGES: list[Any] = [{"role": "user", "content": "hi there"}]


def test_same_output_as_the_python_api(server: ServerProcess, model_dir: Path):
    (output,) = LLM(model_dir).chat([MESSAGES], DecodingParams(max_new_tokens=24), quiet=True)
    parts = [{"type": "text", "text": "hi there"}]
    create: Any = server.openai.chat.completions.create
    answer = create(model="tiny", messages=[{"role": "user", "content": parts}], max_completion_tokens=24)
    assert answer.choices[0].message.content == output.text


def test_several_streams(client: Any):
    asked = {"model": "tiny", "messages": MESSAGES, "n": 3, "temperature": 1.0, "seed": 4, "max_tokens": 16}
    answer = client.chat.completions.create(**asked)
    assert streamed(client.chat.completions.create(**asked, stream=True)) == whole(answer)
    assert len({choice.message.content for choice in answer.choices}) == 3


def test_logprobs(client: Any):
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 16, "extra_body": {"ignore_eos": True}}
    choice = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3).choices[0]
    items = choice.logprobs.content
    assert len(items) == 16
    visible = b"".join(bytes(item.bytes) for item in items if not item.token.startswith("<|"))
    assert visible.decode(errors="replace") == choice.message.content
    for item in items:
        best, *others = item.top_logprobs
        assert (best.token, best.logprob, best.bytes) == (item.token, item.logprob, item.bytes)
        assert len(others) == 2
        assert best.logprob >= others[0].logprob >= others[1].logprob
    parts = [part.choices[0] for part in client.chat.completions.create(**asked, logprobs=True, stream=True)]
    shown = [item for part in parts if part.logprobs for item in part.logprobs.content]
    assert [item.logprob for item in shown] == [item.logprob for item in items]
    assert [item.top_logprobs for item in shown] == [[]] * 16
    assert client.chat.completions.create(**asked, logprobs=False).choices[0].logprobs is None


def test_shape_and_messages_sent_back(server: ServerProcess):
    strict = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True)
    create: Any = strict.chat.completions.create
    chat = create(model="tiny", messages=MESSAGES, max_tokens=4, logprobs=True)
    assert chat.choices[0].message.refusal is None
    ChatCompletion.model_validate(chat.model_dump(exclude_unset=True))
    back = [*MESSAGES, chat.choices[0].message.model_dump(), {"role": "developer", "content": "b"}]
    create(model="tiny", messages=back, max_tokens=4, user="me", logprobs=False)
    chunks = server.openai.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4, stream=True)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert isinstance(text_of(chat.choices[0]), str)


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses", "/v1/diffusion/chat/completions"])
def test_a_conversation_about_the_mask_goes_on(server: ServerProcess, route: str):
    asks = {"role": "user", "content": "What does <|mask|> mean?"}
    history = [asks, {"role": "assistant", "content": "<|mask|> is the mask.", "parsed": None}, asks]
    field = "input" if route == "/v1/responses" else "messages"
    answer = server.http.post(route, json={field: history, "max_completion_tokens": 8})
    assert answer.status_code == 200, answer.text
