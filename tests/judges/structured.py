"""Judge: clients that ask for answers in a form, or for calls of functions, get them, unmodified."""

from __future__ import annotations

import json
from pathlib import Path

from tests.judges.clients import INSTRUCTOR, NODE, PROGRAMS, PYTHON, is_missing, run_client
from tests.judges.report import Options, Report
from tests.judges.server import check_afterwards, serving

CLIENTS: dict[str, tuple[Path, Path]] = {
    "OpenAI": (PYTHON, PROGRAMS / "openai_parse.py"),
    "instructor": (INSTRUCTOR, PROGRAMS / "instructor_models.py"),
    "LangChain": (PYTHON, PROGRAMS / "langchain_structured.py"),
    "pydantic-ai": (PYTHON, PROGRAMS / "pydantic_ai_structured.py"),
    "smolagents": (PYTHON, PROGRAMS / "smolagents_agent.py"),
    "Anthropic": (PYTHON, PROGRAMS / "anthropic_tools.py"),
    "Anthropic, JavaScript": (NODE, PROGRAMS / "anthropic_tools.mjs"),
    "Vercel AI": (NODE, PROGRAMS / "vercel_ai_structured.mjs"),
}
"""By client: the interpreter, and the program, which prints what ``programs/structured.py`` says."""
SERVERS: dict[str, tuple[str, ...]] = {
    "the bundled model": (),
    "a template that knows tools": ("--chat-template", str(PROGRAMS / "tools.jinja")),
}


def judge(options: Options, report: Report) -> None:
    for number, (what, flags) in enumerate(SERVERS.items()):
        extra = ["tools"] if flags else []
        with serving(None, options.out / f"structured-{number}.log", *flags) as server:
            for name, (interpreter, program) in CLIENTS.items():
                if is_missing(interpreter, name):
                    continue
                done = run_client(options, str(interpreter), str(program), server.url, server.model, *extra)
                if done.returncode:
                    report.check(f"{name}, {what}: the program ends", False, done.stderr[-3000:])
                    continue
                found = json.loads(done.stdout.splitlines()[-1])
                wrong = {case: got["error"] for case, got in found.items() if got["error"]}
                report.check(
                    f"{name}, {what}: every answer has its form", bool(found) and not wrong, wrong or len(found)
                )
            check_afterwards(server, report)
