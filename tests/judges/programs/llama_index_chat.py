"""Conversations through LlamaIndex: chat completions."""

from collections.abc import Callable
from functools import partial
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

from tests.judges.programs.conversation import MODEL, URL, Ask, hold

llm = OpenAILike(model=MODEL, api_base=f"{URL}/v1", api_key="none", is_chat_model=True, temperature=0)
FORMS: dict[str, Callable[[Any], Any]] = {
    "object": lambda message: message,
    "saved": lambda message: ChatMessage.model_validate_json(message.model_dump_json()),
}


def chat(messages: list[Any]) -> Any:
    return llm.chat(messages).message


def stream(messages: list[Any]) -> Any:
    return list(llm.stream_chat(messages))[-1].message


def ask(call: Callable[..., Any], form: Callable[[Any], Any], history: list[Any], question: str) -> str:
    history.append(ChatMessage(role="user", content=question))
    message = call(history)
    history.append(form(message))
    return message.content


CASES: dict[str, Ask] = {
    f"{call.__name__}, {form}": partial(ask, call, convert)
    for call in (chat, stream)
    for form, convert in FORMS.items()
}

if __name__ == "__main__":
    hold(CASES)
