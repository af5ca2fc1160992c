"""Answers in a form and calls of tools through Anthropic's client: parse(), streams, and agents of three turns."""

from collections.abc import Callable
from typing import Any, Literal

from anthropic import Anthropic, APIStatusError, BadRequestError, NotFoundError, beta_tool
from pydantic import BaseModel

from tests.judges.programs.structured import HAS_TOOLS, MODEL, QUESTION, URL, Amount, run

client = Anthropic(base_url=URL, api_key="none", max_retries=0)
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
ASKED: Any = {"model": MODEL, "max_tokens": 200}
TOOL: Any = {"name": "measure", "description": "Measures.", "input_schema": Amount.model_json_schema()}
SEARCH: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
ANY: Any = {"type": "any", "disable_parallel_tool_use": True}


class Fruit(BaseModel):
    """Without limits of numbers and lists, which the client keeps to itself, and the bundled model would exceed."""

    unit: Literal["apples", "boxes"]
    is_fresh: bool

    def amount(self) -> Amount:
        return Amount(number=42, unit=self.unit, tags=["fresh"] if self.is_fresh else [])


def parse() -> Any:
    return client.messages.parse(messages=MESSAGES, output_format=Fruit, **ASKED).parsed_output.amount()


def parse_stream() -> Any:
    with client.messages.stream(messages=MESSAGES, output_format=Fruit, **ASKED) as stream:
        return stream.get_final_message().parsed_output.amount()


def beta_parse() -> Any:
    return client.beta.messages.parse(messages=MESSAGES, output_format=Fruit, **ASKED).parsed_output.amount()


def call(choice: Any) -> Any:
    message = client.messages.create(messages=MESSAGES, tools=[TOOL, SEARCH], tool_choice=choice, **ASKED)
    assert message.stop_reason == "tool_use", message
    return Amount.model_validate(message.content[0].input)


def call_stream() -> Any:
    deltas = ""
    with client.messages.stream(messages=MESSAGES, tools=[TOOL], tool_choice=ANY, **ASKED) as stream:
        for event in stream:
            deltas += event.partial_json if event.type == "input_json" else ""
        (used,) = stream.get_final_message().content
    assert Amount.model_validate_json(deltas) == Amount.model_validate(used.input)
    return Amount.model_validate(used.input)


def refusal(**fields: Any) -> APIStatusError:
    try:
        client.messages.create(**{**ASKED, "messages": MESSAGES, **fields})
    except APIStatusError as error:
        return error
    raise AssertionError(f"answered: {fields}")


def errors() -> Any:
    """Of the client's own classes."""
    search, model = refusal(tools=[SEARCH]), refusal(model="claude")
    assert isinstance(search, BadRequestError), search
    assert "tools[0].type" in search.message
    assert isinstance(model, NotFoundError), model
    assert (search.type, model.type) == ("invalid_request_error", "not_found_error")
    return parse()


def models() -> Any:
    (model,) = client.models.list()
    assert model.id == model.display_name == client.models.retrieve(model.id).id == MODEL
    return parse()


def agent() -> Any:
    """A call, an answer to its result, and a question after that, all streamed."""
    history: Any = [*MESSAGES]

    def ask(**fields: Any) -> Any:
        with client.messages.stream(messages=history, tools=[TOOL, SEARCH], **ASKED, **fields) as stream:
            message = stream.get_final_message()
        history.append({"role": "assistant", "content": message.content})
        return message

    (used,) = ask(tool_choice=ANY, thinking={"type": "disabled"}).content
    history.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": used.id, "content": "42"}]})
    assert ask(thinking={"type": "enabled", "budget_tokens": 1024}).stop_reason in (
        "end_turn",
        "max_tokens",
        "tool_use",
    )
    history.append({"role": "user", "content": [{"type": "text", "text": "Are you sure?"}]})
    assert ask(tool_choice={"type": "none"}).content[0].type == "text"
    return Amount.model_validate(used.input)


def tool_runner() -> Any:
    """The client's own loop of calls, which first asks the server to keep the conversation."""
    found = []

    @beta_tool
    def measure(unit: Literal["apples", "boxes"], is_fresh: bool) -> str:
        """Measures.

        Args:
            unit: of what.
            is_fresh: whether it is.
        """
        found.append(Fruit(unit=unit, is_fresh=is_fresh))
        return "42"

    runner = client.beta.messages.tool_runner(
        messages=MESSAGES, tools=[measure], tool_choice=ANY, max_iterations=2, **ASKED
    )
    assert [message.content[0].type for message in runner] == ["tool_use", "tool_use"]
    return found[0].amount()


CASES: dict[str, Callable[[], Any]] = {
    "messages.parse": parse,
    "messages.stream": parse_stream,
    "beta.messages.parse": beta_parse,
    "any tool": lambda: call(ANY),
    "a named tool": lambda: call({"type": "tool", "name": "measure"}),
    "a call, streamed": call_stream,
    "errors": errors,
    "models": models,
}
AGENTS: dict[str, Callable[[], Any]] = {"an agent, streamed": agent, "tool_runner": tool_runner}

if __name__ == "__main__":
    run({**CASES, **(AGENTS if HAS_TOOLS else {})})
