"""Conversations through litellm: chat completions, responses and completions."""

from collections.abc import Callable
from functools import partial
from typing import Any

import litellm

from tests.judges.programs.conversation import MODEL, URL, Ask, complete, hold

SERVER: dict[str, Any] = {"api_base": f"{URL}/v1", "api_key": "none", "num_retries": 0}
FORMS: dict[str, Callable[[Any], Any]] = {
    "object": lambda item: item,
    "model_dump()": lambda item: item.model_dump(),
    "model_dump(exclude_none)": lambda item: item.model_dump(exclude_none=True),
    "model_dump(json)": lambda item: item.model_dump(mode="json"),
}


def create(messages: list[Any], provider: str) -> Any:
    return litellm.completion(model=f"{provider}/{MODEL}", messages=messages, **SERVER)


def stream(messages: list[Any], provider: str) -> Any:
    chunks = litellm.completion(model=f"{provider}/{MODEL}", messages=messages, stream=True, **SERVER)
    return litellm.stream_chunk_builder(list(chunks), messages=messages)


def ask_chat(
    call: Callable[..., Any], provider: str, form: Callable[[Any], Any], history: list[Any], question: str
) -> str:
    history.append({"role": "user", "content": question})
    message = call(history, provider).choices[0].message
    history.append(form(message))
    return message.content


def ask_responses(form: Callable[[Any], Any], history: list[Any], question: str) -> str:
    history.append({"role": "user", "content": question})
    output = litellm.responses(model=f"openai/{MODEL}", input=history, **SERVER).output
    history += map(form, output)
    return "".join(part.text for item in output for part in item.content)


def ask_completions(history: list[Any], question: str) -> str:
    def call(prompt: str) -> str:
        got = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt=prompt, **SERVER)
        return got.choices[0].text

    return complete(history, question, call)


CASES: dict[str, Ask] = {"completions": ask_completions}
for form, convert in FORMS.items():
    CASES[f"responses, {form}"] = partial(ask_responses, convert)
    for call in create, stream:
        for provider in "openai", "hosted_vllm":
            CASES[f"{provider}, {call.__name__}, {form}"] = partial(ask_chat, call, provider, convert)

if __name__ == "__main__":
    hold(CASES)
