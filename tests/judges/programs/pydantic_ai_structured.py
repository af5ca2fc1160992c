"""Answers in a form through pydantic-ai: as a tool's arguments and as a schema, with a union that a field decides."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.judges.programs.structured import MODEL, QUESTION, URL, Amount, run

PROVIDER = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")


class Loose(BaseModel):
    """Fruit one by one."""

    kind: Literal["loose"]
    amount: Amount


class Packed(BaseModel):
    """Fruit in boxes."""

    kind: Literal["packed"]
    boxes: Literal[1, 2, 3]
    each: Amount


class Delivery(BaseModel):
    """What came."""

    content: Annotated[Loose | Packed, Field(discriminator="kind")]


def amount(model: Any, form: Any) -> Any:
    return Agent(model, output_type=form(Amount), retries=0).run_sync(QUESTION).output


def union(model: Any, form: Any) -> Any:
    content = Agent(model, output_type=form(Delivery), retries=0).run_sync(QUESTION).output.content
    return content.amount if isinstance(content, Loose) else content.each


def streamed(model: Any, form: Any) -> Any:
    return Agent(model, output_type=form(Amount), retries=0).run_stream_sync(QUESTION).get_output()


CASES: dict[str, Callable[[], Any]] = {
    f"{route}, {form.__name__}, {ask.__name__}": partial(ask, kind(MODEL, provider=PROVIDER), form)
    for route, kind in {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}.items()
    for form in (ToolOutput, NativeOutput)
    for ask in (amount, union, streamed)
}

if __name__ == "__main__":
    run(CASES)
