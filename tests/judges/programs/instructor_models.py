"""Answers in a form through instructor, in its modes that send a schema."""

from functools import partial
from typing import Any

import instructor
from openai import OpenAI

from tests.judges.programs.structured import MODEL, QUESTION, URL, Amount, run

MODES = {
    "tools": instructor.Mode.TOOLS,
    "tools, strict": instructor.Mode.TOOLS_STRICT,
    "JSON schema": instructor.Mode.JSON_SCHEMA,
}


def ask(mode: Any, *, partially: bool = False) -> Any:
    client = instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0), mode=mode)
    messages: Any = [{"role": "user", "content": QUESTION}]
    kwargs: Any = {"model": MODEL, "messages": messages, "max_retries": 0}
    if not partially:
        return client.chat.completions.create(response_model=Amount, **kwargs)
    *_, last = client.chat.completions.create_partial(response_model=Amount, **kwargs)
    return Amount.model_validate(last.model_dump())


CASES = {}
for name, mode in MODES.items():
    CASES[name] = partial(ask, mode)
    CASES[f"{name}, partial"] = partial(ask, mode, partially=True)

if __name__ == "__main__":
    run(CASES)
