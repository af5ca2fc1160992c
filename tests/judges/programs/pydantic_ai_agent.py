"""Conversations through pydantic-ai: chat completions and responses."""

from collections.abc import Callable
from functools import partial
from typing import Any

from pydantic_ai import Agent, ModelMessagesTypeAdapter
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.judges.programs.conversation import MODEL, URL, Ask, hold

PROVIDER = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
FORMS: dict[str, Callable[[Any], Any]] = {
    "objects": lambda result: result.all_messages(),
    "saved": lambda result: ModelMessagesTypeAdapter.validate_json(result.all_messages_json()),
}


async def run(agent: Any, form: Callable[[Any], Any], history: list[Any], question: str) -> str:
    result = await agent.run(question, message_history=history)
    history[:] = form(result)
    return result.output


async def stream(agent: Any, form: Callable[[Any], Any], history: list[Any], question: str) -> str:
    async with agent.run_stream(question, message_history=history) as result:
        text = "".join([piece async for piece in result.stream_text(delta=True)])
    history[:] = form(result)
    return text


CASES: dict[str, Ask] = {
    f"{name}, {call.__name__}, {form}": partial(call, Agent(model(MODEL, provider=PROVIDER)), convert)
    for name, model in {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}.items()
    for call in (run, stream)
    for form, convert in FORMS.items()
}

if __name__ == "__main__":
    hold(CASES)
