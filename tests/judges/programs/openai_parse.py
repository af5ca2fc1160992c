"""Answers in a form through OpenAI's client: parse() and stream() of chat completions and Responses, and tools."""

from collections.abc import Callable
from typing import Any

import openai
from openai import OpenAI

from tests.judges.programs.structured import HAS_TOOLS, MODEL, QUESTION, URL, Amount, run

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
CHAT_TOOL: Any = openai.pydantic_function_tool(Amount)
RESPONSE_TOOL: Any = openai.pydantic_function_tool(Amount)["function"] | {"type": "function"}
CHOICE: Any = {"type": "function", "function": {"name": "Amount"}}


def chat_parse() -> Any:
    message = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Amount).choices[0].message
    # Sent back as it is, with its parsed value.
    again: Any = [*MESSAGES, message, *MESSAGES]
    client.chat.completions.parse(model=MODEL, messages=again, response_format=Amount)
    return message.parsed


def chat_stream() -> Any:
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, response_format=Amount) as stream:
        return stream.get_final_completion().choices[0].message.parsed


def chat_tool(choice: Any) -> Any:
    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, tools=[CHAT_TOOL], tool_choice=choice)
    assert answer.choices[0].finish_reason == "tool_calls", answer
    return answer.choices[0].message.tool_calls[0].function.parsed_arguments


def chat_tool_stream() -> Any:
    kwargs: Any = {"tools": [CHAT_TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, **kwargs) as stream:
        events = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        assert len(events) == 1, events
        return events[0].parsed_arguments


def responses_parse() -> Any:
    response = client.responses.parse(model=MODEL, input=QUESTION, text_format=Amount)
    again: Any = [*MESSAGES, *response.output, *MESSAGES]
    client.responses.parse(model=MODEL, input=again, text_format=Amount)
    return response.output_parsed


def responses_stream() -> Any:
    with client.responses.stream(model=MODEL, input=QUESTION, text_format=Amount) as stream:
        return stream.get_final_response().output_parsed


def responses_tool() -> Any:
    response = client.responses.parse(model=MODEL, input=QUESTION, tools=[RESPONSE_TOOL], tool_choice="required")
    return Amount.model_validate_json(response.output[0].arguments)


def responses_tool_stream() -> Any:
    kwargs: Any = {"tools": [RESPONSE_TOOL], "tool_choice": {"type": "function", "name": "Amount"}}
    with client.responses.stream(model=MODEL, input=QUESTION, **kwargs) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        (call,) = stream.get_final_response().output
        assert "".join(deltas) == call.arguments
        return Amount.model_validate_json(call.arguments)


def chat_agent() -> Any:
    """Two turns: a call, and an answer to its result."""
    kwargs: Any = {"model": MODEL, "tools": [CHAT_TOOL]}
    message = client.chat.completions.create(messages=MESSAGES, tool_choice=CHOICE, **kwargs).choices[0].message
    (call,) = message.tool_calls
    history: Any = [*MESSAGES, message, {"role": "tool", "tool_call_id": call.id, "content": "42"}]
    assert client.chat.completions.create(messages=history, **kwargs).choices[0].finish_reason
    return Amount.model_validate_json(call.function.arguments)


def responses_agent() -> Any:
    kwargs: Any = {"model": MODEL, "tools": [RESPONSE_TOOL], "store": False}
    response = client.responses.create(input=MESSAGES, tool_choice="required", parallel_tool_calls=False, **kwargs)
    (call,) = response.output
    history: Any = [*MESSAGES, call, {"type": "function_call_output", "call_id": call.call_id, "output": "42"}]
    assert client.responses.create(input=history, **kwargs).output
    return Amount.model_validate_json(call.arguments)


def chat_format_beside_tools() -> Any:
    kwargs: Any = {"tools": [CHAT_TOOL], "response_format": Amount}
    message = client.chat.completions.parse(model=MODEL, messages=MESSAGES, **kwargs).choices[0].message
    return message.parsed or message.tool_calls[0].function.parsed_arguments


CASES: dict[str, Callable[[], Any]] = {
    "chat.completions.parse": chat_parse,
    "chat.completions.stream": chat_stream,
    "chat, a named function": lambda: chat_tool(CHOICE),
    "chat, a required call": lambda: chat_tool("required"),
    "chat, a required call, streamed": chat_tool_stream,
    "responses.parse": responses_parse,
    "responses.stream": responses_stream,
    "responses, a required call": responses_tool,
    "responses, a named function, streamed": responses_tool_stream,
}
AGENTS: dict[str, Callable[[], Any]] = {
    "chat, a call and its result": chat_agent,
    "responses, a call and its result": responses_agent,
    "chat, a schema beside tools": chat_format_beside_tools,
}

if __name__ == "__main__":
    run({**CASES, **(AGENTS if HAS_TOOLS else {})})
