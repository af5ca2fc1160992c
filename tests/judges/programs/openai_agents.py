"""Conversations through OpenAI's agents SDK: chat completions and responses. Tracing is off: it reports to OpenAI."""

from functools import partial
from typing import Any

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from tests.judges.programs.conversation import MODEL, URL, Ask, hold

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


async def run(agent: Any, given: Any, **fields: Any) -> Any:
    return await Runner.run(agent, given, **fields)


async def stream(agent: Any, given: Any, **fields: Any) -> Any:
    result = Runner.run_streamed(agent, given, **fields)
    async for _ in result.stream_events():
        pass
    return result


async def ask_list(agent: Any, call: Any, history: list[Any], question: str) -> str:
    result = await call(agent, [*history, {"role": "user", "content": question}])
    history[:] = result.to_input_list()
    return result.final_output


async def ask_session(agent: Any, call: Any, history: list[Any], question: str) -> str:
    """Lets the SDK keep the history."""
    if not history:
        history.append(SQLiteSession("judge"))
    return (await call(agent, question, session=history[0])).final_output


CASES: dict[str, Ask] = {
    f"{name}, {call.__name__}, {form}": partial(ask, Agent("judge", model=model(MODEL, client)), call)
    for name, model in {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}.items()
    for call in (run, stream)
    for form, ask in {"to_input_list()": ask_list, "session": ask_session}.items()
}

if __name__ == "__main__":
    hold(CASES)
