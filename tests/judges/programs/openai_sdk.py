"""Conversations through OpenAI's client: chat completions, responses and completions."""

from collections.abc import Callable
from functools import partial
from typing import Any

from openai import OpenAI

from tests.judges.programs.conversation import MODEL, URL, Ask, complete, hold

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)

FORMS: dict[str, Callable[[Any], Any]] = {
    "object": lambda item: item,
    "model_dump()": lambda item: item.model_dump(),
    "model_dump(exclude_none)": lambda item: item.model_dump(exclude_none=True),
    "model_dump(exclude_unset)": lambda item: item.model_dump(exclude_unset=True),
    "model_dump(json)": lambda item: item.model_dump(mode="json"),
    "to_dict()": lambda item: item.to_dict(),
}
"""How an answer goes into the history."""


def chat_create(history: list[Any]) -> Any:
    return client.chat.completions.create(model=MODEL, messages=history).choices[0].message


def chat_parse(history: list[Any]) -> Any:
    return client.chat.completions.parse(model=MODEL, messages=history).choices[0].message


def chat_stream(history: list[Any]) -> Any:
    with client.chat.completions.stream(model=MODEL, messages=history) as stream:
        return stream.get_final_completion().choices[0].message


def responses_create(history: list[Any]) -> Any:
    return client.responses.create(model=MODEL, input=history, store=False).output


def responses_parse(history: list[Any]) -> Any:
    return client.responses.parse(model=MODEL, input=history).output


def responses_stream(history: list[Any]) -> Any:
    with client.responses.stream(model=MODEL, input=history) as stream:
        return stream.get_final_response().output


def responses_events(history: list[Any]) -> Any:
    events = client.responses.create(model=MODEL, input=history, stream=True)
    return [event.item for event in events if event.type == "response.output_item.done"]


def ask_chat(call: Callable[[list[Any]], Any], form: Callable[[Any], Any], history: list[Any], question: str) -> str:
    history.append({"role": "user", "content": question})
    message = call(history)
    history.append(form(message))
    return message.content


def ask_responses(
    call: Callable[[list[Any]], Any], form: Callable[[Any], Any], history: list[Any], question: str
) -> str:
    history.append({"role": "user", "content": question})
    output = call(history)
    history += map(form, output)
    return "".join(part.text for item in output if item.type == "message" for part in item.content)


def ask_deltas(history: list[Any], question: str) -> str:
    """Sends back the deltas of a stream, merged, with every field that they have."""
    history.append({"role": "user", "content": question})
    message: dict[str, Any] = {"content": ""}
    for chunk in client.chat.completions.create(model=MODEL, messages=history, stream=True):
        delta = chunk.choices[0].delta.model_dump()
        text, role = message["content"] + (delta["content"] or ""), delta["role"] or message["role"]
        message = {**delta, "content": text, "role": role}
    history.append(message)
    return message["content"]


def ask_parts(history: list[Any], question: str) -> str:
    """Sends the texts of chat messages as parts."""
    history.append({"role": "user", "content": [{"type": "text", "text": question}]})
    message = client.chat.completions.create(model=MODEL, messages=history).choices[0].message
    history.append({"role": "assistant", "content": [{"type": "text", "text": message.content}]})
    return message.content


def ask_items(history: list[Any], question: str) -> str:
    """Sends the user's messages as items with parts, and the answer's text alone."""
    history.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": question}]})
    text = client.responses.create(model=MODEL, input=history).output_text
    history.append({"role": "assistant", "content": text})
    return text


def ask_completions(stream: bool, history: list[Any], question: str) -> str:
    def call(prompt: str) -> str:
        got = client.completions.create(model=MODEL, prompt=prompt, stream=stream)
        return "".join(chunk.choices[0].text for chunk in got) if stream else got.choices[0].text

    return complete(history, question, call)


CASES: dict[str, Ask] = {
    "chat_create, merged deltas": ask_deltas,
    "chat_create, parts": ask_parts,
    "responses_create, parts": ask_items,
    "completions": partial(ask_completions, False),
    "completions, stream": partial(ask_completions, True),
}
for form, convert in FORMS.items():
    for call in chat_create, chat_parse, chat_stream:
        CASES[f"{call.__name__}, {form}"] = partial(ask_chat, call, convert)
    for call in responses_create, responses_parse, responses_stream, responses_events:
        CASES[f"{call.__name__}, {form}"] = partial(ask_responses, call, convert)

if __name__ == "__main__":
    hold(CASES)
