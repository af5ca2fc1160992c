"""Steps of an agent through smolagents, which sends a required call, and strings of stop with it."""

from typing import Any

from smolagents import LogLevel, OpenAIModel, Tool, ToolCallingAgent
from smolagents.memory import ActionStep

from tests.judges.programs.structured import HAS_TOOLS, MODEL, QUESTION, URL, Amount, run

UNIT = {"type": "string", "enum": ["apples", "boxes"], "description": "Of what."}
NUM_STEPS = 3


class Count(Tool):
    name = "count"
    description = "Counts fruit."
    inputs = {"unit": UNIT}
    output_type = "string"

    def forward(self, unit: str) -> str:
        return f"42 {unit}"


class FinalAnswer(Tool):
    name = "final_answer"
    description = "Answers the question."
    inputs = {"answer": UNIT}
    output_type = "string"

    def forward(self, answer: str) -> str:
        return answer


def is_last(answer: object, memory: Any, agent: object) -> bool:
    """Lets the agent answer in its last step alone."""
    return sum(isinstance(step, ActionStep) for step in memory.steps) >= NUM_STEPS


def steps(**fields: Any) -> Any:
    model = OpenAIModel(MODEL, f"{URL}/v1", api_key="none", client_kwargs={"max_retries": 0})
    agent = ToolCallingAgent(
        [Count(), FinalAnswer()], model, verbosity_level=LogLevel.OFF, final_answer_checks=[is_last], **fields
    )
    agent.run(QUESTION, max_steps=NUM_STEPS)
    made = [step for step in agent.memory.steps if isinstance(step, ActionStep) and step.tool_calls]
    assert len(made) >= NUM_STEPS, [step.dict() for step in agent.memory.steps]
    calls = [call.dict()["function"] for step in made for call in step.tool_calls]
    units = {call["arguments"].get("unit") or call["arguments"].get("answer") for call in calls}
    assert units <= {"apples", "boxes"}, calls
    return Amount(number=42, unit=units.pop(), tags=[])


CASES = {"three steps": steps, "three steps, streamed": lambda: steps(stream_outputs=True)}

if __name__ == "__main__":
    run(CASES if HAS_TOOLS else {"three steps": steps})
