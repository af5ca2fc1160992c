"""Conversations through Anthropic's client: messages, whole and streamed, and those of its beta API."""

from collections.abc import Callable
from functools import partial
from typing import Any

from anthropic import Anthropic, AsyncAnthropic

from tests.judges.programs.conversation import MODEL, URL, Ask, hold

client = Anthropic(base_url=URL, api_key="none", max_retries=0)
by_token = AsyncAnthropic(base_url=URL, auth_token="none", max_retries=0)
ASKED: Any = {"model": MODEL, "max_tokens": 256}
BETAS = ["interleaved-thinking-2025-05-14", "context-management-2025-06-27"]

FORMS: dict[str, Callable[[Any], Any]] = {
    "content": lambda message: {"role": "assistant", "content": message.content},
    "to_param()": lambda message: message.to_param(),
    "model_dump()": lambda message: {"role": "assistant", "content": message.model_dump()["content"]},
    "to_dict()": lambda message: {"role": "assistant", "content": message.to_dict()["content"]},
    "text": lambda message: {"role": "assistant", "content": message.content[0].text},
}
"""How an answer goes into the history."""


def create(messages: list[Any]) -> Any:
    return client.messages.create(messages=messages, **ASKED)


def stream(messages: list[Any]) -> Any:
    with client.messages.stream(messages=messages, **ASKED) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert message.content[0].text == text
    return message


def beta(messages: list[Any]) -> Any:
    return client.beta.messages.create(
        messages=messages,
        betas=BETAS,
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        thinking={"type": "adaptive"},
        metadata={"user_id": "judge"},
        **ASKED,
    )


def beta_stream(messages: list[Any]) -> Any:
    with client.beta.messages.stream(messages=messages, betas=BETAS, **ASKED) as stream:
        return stream.get_final_message()


def ask(call: Callable[[list[Any]], Any], form: Callable[[Any], Any], history: list[Any], question: str) -> str:
    history.append({"role": "user", "content": question})
    message = call(history)
    usage = message.usage
    counted = client.messages.count_tokens(model=MODEL, messages=history).input_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == counted, (usage, counted)
    history.append(form(message))
    return message.content[0].text


def ask_events(history: list[Any], question: str) -> str:
    """Collects the deltas, and sends text blocks with hints for caches back."""
    hint = {"cache_control": {"type": "ephemeral"}}
    history.append({"role": "user", "content": [{"type": "text", "text": question, **hint}]})
    text = ""
    for event in client.messages.create(messages=history, stream=True, **ASKED):
        if event.type == "content_block_delta":
            text += event.delta.text
    history.append({"role": "assistant", "content": [{"type": "text", "text": text, **hint}]})
    return text


async def ask_async(history: list[Any], question: str) -> str:
    history.append({"role": "user", "content": question})
    async with by_token.messages.stream(messages=history, **ASKED) as stream:
        message = await stream.get_final_message()
    history.append({"role": message.role, "content": message.content})
    return message.content[0].text


CASES: dict[str, Ask] = {
    f"{call.__name__}, {form}": partial(ask, call, convert)
    for call in (create, stream, beta, beta_stream)
    for form, convert in FORMS.items()
}
CASES |= {"events, blocks": ask_events, "async stream, a token": ask_async}

if __name__ == "__main__":
    hold(CASES)
