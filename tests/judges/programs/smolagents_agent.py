"""Steps of an agent through smolagents, which sends a required call, and strings of stop with it."""

from typing import Any, Literal

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool
from smolagents.memory import ActionStep

from tests.judges.programs.structured import HAS_TOOLS, MODEL, QUESTION, URL, Amount, run

NUM_STEPS = 3


def count(unit: Literal["apples", "boxes"]) -> str:
    """Counts fruit.

    Args:
        unit: Of what.
    """
    return f"42 {unit}"


def final_answer(answer: Literal["apples", "boxes"]) -> str:
    """Answers the question.

    Args:
        answer: Of what.
    """
    return answer


def is_last(answer: object, memory: Any, agent: object) -> bool:
    """Lets the agent answer in its last step alone."""
    return sum(isinstance(step, ActionStep) for step in memory.steps) >= NUM_STEPS


def steps(**fields: Any) -> Any:
    model = OpenAIModel(MODEL, f"{URL}/v1", api_key="none", client_kwargs={"max_retries": 0})
    agent = ToolCallingAgent(
        [tool(count), tool(final_answer)], model, verbosity_level=LogLevel.OFF, final_answer_checks=[is_last], **fields
    )
    agent.prompt_templates["system_prompt"] = "Call tools."  # its own leaves the bundled model no room for steps
    agent.run(QUESTION, max_steps=NUM_STEPS)
    print()  # after what it shows of a stream
    made = [step for step in agent.memory.steps if isinstance(step, ActionStep) and step.tool_calls]
    assert len(made) >= NUM_STEPS, [step.dict() for step in agent.memory.steps]
    calls = [call.dict()["function"] for step in made for call in step.tool_calls]
    units = {call["arguments"].get("unit") or call["arguments"].get("answer") for call in calls}
    assert units <= {"apples", "boxes"}, calls
    return Amount(number=42, unit=units.pop(), tags=[])


CASES = {"three steps": steps, "three steps, streamed": lambda: steps(stream_outputs=True)}

if __name__ == "__main__":
    run(CASES if HAS_TOOLS else {"three steps": steps})
