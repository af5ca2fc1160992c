"""Answers in a form through LangChain: with_structured_output and bind_tools, over chat completions and Responses."""

from collections.abc import Callable
from functools import partial
from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

from tests.judges.programs.structured import HAS_TOOLS, MODEL, QUESTION, URL, Amount, run


def model(**fields: Any) -> Any:
    return ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_retries=0, **fields)


def structured(fields: dict[str, Any], options: dict[str, Any]) -> Any:
    return model(**fields).with_structured_output(Amount, **options).invoke(QUESTION)


def streamed(fields: dict[str, Any], options: dict[str, Any]) -> Any:
    *_, last = model(**fields).with_structured_output(Amount, **options).stream(QUESTION)
    return last


def bound(fields: dict[str, Any], choice: str) -> Any:
    answer = model(**fields).bind_tools([Amount], tool_choice=choice).invoke(QUESTION)
    return Amount.model_validate(answer.tool_calls[0]["args"])


def bound_stream(fields: dict[str, Any], choice: str) -> Any:
    first, *others = model(**fields).bind_tools([Amount], tool_choice=choice, strict=True).stream(QUESTION)
    return Amount.model_validate(sum(others, first).tool_calls[0]["args"])


def agent(fields: dict[str, Any]) -> Any:
    """A call, and an answer to its result, for which the model is free to call again."""
    chat = model(**fields)
    history: list[Any] = [HumanMessage(QUESTION)]
    answer = chat.bind_tools([Amount], tool_choice="any", parallel_tool_calls=False).invoke(history)
    (call,) = answer.tool_calls
    history += [answer, ToolMessage("42", tool_call_id=call["id"])]
    assert chat.bind_tools([Amount]).invoke(history).content is not None
    return Amount.model_validate(call["args"])


CASES: dict[str, Callable[[], Any]] = {}
ROUTES: dict[str, dict[str, Any]] = {"chat": {}, "responses": {"use_responses_api": True}}
for route, fields in ROUTES.items():
    for method in ("json_schema", "function_calling"):
        CASES[f"{route}, {method}"] = partial(structured, fields, {"method": method})
        CASES[f"{route}, {method}, strict"] = partial(structured, fields, {"method": method, "strict": True})
        CASES[f"{route}, {method}, streamed"] = partial(streamed, fields, {"method": method})
    for choice in ("any", "Amount"):
        CASES[f"{route}, bind_tools, {choice}"] = partial(bound, fields, choice)
        CASES[f"{route}, bind_tools, {choice}, streamed"] = partial(bound_stream, fields, choice)
    if HAS_TOOLS:
        CASES[f"{route}, a call and its result"] = partial(agent, fields)

if __name__ == "__main__":
    run(CASES)
