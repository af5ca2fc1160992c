"""Holds the conversations of a client: each case of a program asks the questions in turn, and sends the history back.

Arguments of a program: URL, MODEL, QUESTIONS (JSON). It prints a JSON object: by case, the answers and the error.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

URL, MODEL, QUESTIONS = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])

Ask = Callable[[list[Any], str], str | Awaitable[str]]
"""Asks a question after the history, adds question and answer to the history, and returns the answer."""


def hold(cases: Mapping[str, Ask]) -> None:
    """Holds one conversation for each case, by its name, and prints what came."""
    # One loop for all: clients keep connections, which belong to a loop.
    print(json.dumps(asyncio.new_event_loop().run_until_complete(_hold(cases))))


async def _hold(cases: Mapping[str, Ask]) -> dict[str, dict[str, Any]]:
    found = {}
    for name, ask in cases.items():
        history: list[Any] = []
        answers: list[str] = []
        error = None
        try:
            for question in QUESTIONS:
                answer = ask(history, question)
                answers.append(answer if isinstance(answer, str) else await answer)
        except Exception as exception:  # noqa: BLE001  # the other cases go on, and the judge sees the error
            error = f"{type(exception).__name__}: {exception}"
        found[name] = {"answers": answers, "error": error}
    return found


def complete(history: list[Any], question: str, call: Callable[[str], str]) -> str:
    """An ``Ask`` of a route for completions, given the call: the prompt has the form of the chat template."""
    history.append(f"<|user|>{question}<|assistant|>")
    text = call("".join(history))
    history.append(f"{text}<|endoftext|>")
    return text
