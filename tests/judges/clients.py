"""Judge: conversations of other projects' clients are read as they send them back, and evalplus works unchanged."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.judges.client import CHAT
from tests.judges.report import Options, Report
from tests.judges.server import ROOT, Server, check_afterwards, serving
from tests.judges.tools import offline_environment, require

QUESTIONS = (
    "Tom has 12 apples and buys 30 more. How many apples does he have?",
    "Now he gives 5 away. How many apples are left?",
    "He eats 2 of them. How many apples are left?",
)
"""One conversation: without the history the last two cannot be answered."""
PROGRAMS = Path(__file__).parent / "programs"
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
"""Has the newest clients, which need other versions of libraries than the judges' tools; made by ci/judges.sh."""
INSTRUCTOR = ROOT / ".venv-instructor" / "bin" / "python"
"""Has instructor, which needs an older version of OpenAI's client."""
NODE = PROGRAMS / "node_modules" / ".bin" / "node"
CLIENTS: dict[str, tuple[Path, ...]] = {
    "OpenAI": (PYTHON, PROGRAMS / "openai_sdk.py"),
    "LangChain": (PYTHON, PROGRAMS / "langchain_chat.py"),
    "litellm": (PYTHON, PROGRAMS / "litellm_chat.py"),
    "pydantic-ai": (PYTHON, PROGRAMS / "pydantic_ai_agent.py"),
    "OpenAI Agents": (PYTHON, PROGRAMS / "openai_agents.py"),
    "Anthropic": (PYTHON, PROGRAMS / "anthropic_sdk.py"),
    "Anthropic, JavaScript": (NODE, PROGRAMS / "anthropic_sdk.mjs"),
    "LlamaIndex": (Path(sys.executable), PROGRAMS / "llama_index_chat.py"),
    "Vercel AI": (NODE, PROGRAMS / "vercel_ai.mjs"),
}
"""By client: the interpreter, and the program, which prints its conversations as ``programs/conversation.py`` says."""
REFUSED = {"responses, stored": "store: false"}
"""By the beginning of cases that cannot work, because the server keeps no answers: what the error says to set."""
TASKS = Path(__file__).parent / "tasks" / "humaneval.jsonl"
"""Two problems in the form of HumanEval+, which evalplus would fetch otherwise."""
NUM_SAMPLES = 3


def judge(options: Options, report: Report) -> None:
    with serving(options.url, options.out / "clients.log") as server:
        expected, tokens = _plain_conversation(server, QUESTIONS)
        alone, _ = _plain_conversation(server, QUESTIONS[-1:])
        report.check("the last answer depends on the history", alone != expected[-1:], expected)
        for name, command in CLIENTS.items():
            if is_missing(command[0], name):
                continue
            before = _tokens(server)
            done = run_client(options, *map(str, command), server.url, server.model, json.dumps(QUESTIONS))
            if done.returncode:
                report.check(f"{name}: the program ends", False, done.stderr[-3000:])
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            wrong = {case: got for case, got in found.items() if not as_expected(case, got, expected)}
            report.check(f"{name}: conversations as over plain HTTP", bool(found) and not wrong, wrong or len(found))
            asked = sum(sum(tokens[: len(got["answers"])]) for got in found.values())
            report.check(f"{name}: tokens as over plain HTTP", (used := _tokens(server) - before) == asked, used)
        require("evalplus")
        _judge_evalplus(server, options, report)
        check_afterwards(server, report)


def is_missing(interpreter: Path, client: str) -> bool:
    """Whether a client is to be skipped, which is then said."""
    is_skipped = interpreter == NODE and shutil.which("npm") is None
    if is_skipped:
        print(f"  skipped {client}: npm is not installed")
    return is_skipped


def as_expected(case: str, got: Mapping[str, Any], expected: Sequence[str]) -> bool:
    """Whether a conversation has the expected answers, or is refused after the first for the reason in REFUSED."""
    for beginning, reason in REFUSED.items():
        if case.startswith(beginning):
            return got["answers"] == expected[:1] and reason in (got["error"] or "")
    return got["error"] is None and got["answers"] == expected


def _plain_conversation(server: Server, questions: Sequence[str]) -> tuple[list[str], list[int]]:
    """The answers over HTTP without a client, and the tokens of each prompt with its answer."""
    messages, answers, tokens = [], [], []
    for question in questions:
        messages.append({"role": "user", "content": question})
        body = httpx.post(server.url + CHAT, json={"messages": messages}, timeout=60).raise_for_status().json()
        answers.append(body["choices"][0]["message"]["content"])
        tokens.append(body["usage"]["total_tokens"])
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers, tokens


def _tokens(server: Server) -> float:
    """Tokens of all prompts and answers so far."""
    server.await_no_pages()
    metrics = server.metrics()
    return metrics["vllm:prompt_tokens_total"] + metrics["vllm:generation_tokens_total"]


def _judge_evalplus(server: Server, options: Options, report: Report) -> None:
    """Lets evalplus generate code, greedily and three samples of each problem at temperature 0.8."""
    problems = [json.loads(line)["task_id"] for line in TASKS.read_text().splitlines()]
    ways: dict[str, Sequence[str]] = {
        "greedy": ("--greedy",),
        "sampled": ("--temperature", "0.8", "--n_samples", str(NUM_SAMPLES)),
    }
    for way, flags in ways.items():
        root = options.out / f"evalplus-{way}"
        command = ["-m", "evalplus.codegen", "--model", server.model, "--dataset", "humaneval", "--backend", "openai"]
        done = run_client(
            options, sys.executable, *command, "--base_url", f"{server.url}/v1", "--root", str(root), *flags
        )
        what = f"evalplus, {way}"
        report.check(f"{what}, finishes", done.returncode == 0, done.stderr[-3000:] if done.returncode else "yes")
        if done.returncode:
            continue
        raw = next(root.rglob("*.raw.jsonl"))
        rows = [json.loads(line) for line in raw.read_text().splitlines()]
        by_problem = {problem: [row["solution"] for row in rows if row["task_id"] == problem] for problem in problems}
        wanted = 1 if way == "greedy" else NUM_SAMPLES
        distinct = {problem: len(set(texts)) for problem, texts in by_problem.items()}
        counts = {problem: len(texts) for problem, texts in by_problem.items()}
        report.check(f"{what}: {wanted} answers to each problem", set(counts.values()) == {wanted}, counts)
        if way != "greedy":
            # Two may be alike by chance: the bundled model has few ways to say that it cannot answer.
            report.check(f"{what}: answers that differ", min(distinct.values()) > 1, distinct)


def run_client(options: Options, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs a client without network, with the problems of evalplus from this project."""
    environment = offline_environment(options) | {
        "HUMANEVAL_OVERRIDE_PATH": str(TASKS),
        "OPENAI_API_KEY": "none",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace")
