"""Conversations through LangChain: chat completions and responses."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from langchain_core.messages import (
    AIMessage,
    HumanMessage,
    convert_to_openai_messages,
    message_chunk_to_message,
    message_to_dict,
    messages_from_dict,
)
from langchain_core.messages.content import create_text_block
from langchain_openai import ChatOpenAI, OpenAI

from tests.judges.programs.conversation import MODEL, URL, Ask, complete, hold

MODES: dict[str, dict[str, Any]] = {
    "chat": {},
    "chat, v1": {"output_version": "v1"},
    "responses": {"use_responses_api": True},
    "responses, v0": {"use_responses_api": True, "output_version": "v0"},
    "responses, v1": {"use_responses_api": True, "output_version": "v1"},
    "responses, store false": {"use_responses_api": True, "store": False, "include": ["reasoning.encrypted_content"]},
}
FORMS: dict[str, Callable[[Any], Any]] = {
    "object": lambda message: message,
    "saved": lambda message: messages_from_dict(json.loads(json.dumps([message_to_dict(message)])))[0],
    "model_dump()": lambda message: message_chunk_to_message(message).model_dump(),
    "OpenAI's form": convert_to_openai_messages,
    "content_blocks": lambda message: AIMessage(content_blocks=message.content_blocks),
    "tuple": lambda message: ("ai", message.text),
}


def invoke(chat: Any, history: list[Any]) -> Any:
    return chat.invoke(history)


def stream(chat: Any, history: list[Any]) -> Any:
    first, *others = chat.stream(history)
    return sum(others, first)


def ask(chat: Any, call: Callable[..., Any], form: Callable[[Any], Any], history: list[Any], question: str) -> str:
    history.append(HumanMessage(question))
    message = call(chat, history)
    history.append(form(message))
    return message.text


def ask_blocks(chat: Any, history: list[Any], question: str) -> str:
    """Writes both sides of the history as text blocks, which have ids."""
    history.append(HumanMessage(content_blocks=[create_text_block(question)]))
    text = chat.invoke(history).text
    history.append(AIMessage(content_blocks=[create_text_block(text)]))
    return text


def ask_completions(history: list[Any], question: str) -> str:
    llm = OpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", temperature=0)  # by default it samples
    return complete(history, question, llm.invoke)


CASES: dict[str, Ask] = {"completions": ask_completions}
for mode, fields in MODES.items():
    chat = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_retries=0, **fields)
    CASES[f"{mode}, text blocks"] = partial(ask_blocks, chat)
    for call in invoke, stream:
        for form, convert in FORMS.items():
            CASES[f"{mode}, {call.__name__}, {form}"] = partial(ask, chat, call, convert)

if __name__ == "__main__":
    hold(CASES)
