"""Judge: LangChain, LlamaIndex, litellm and evalplus work unchanged, and get the engine's text."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lopa_ascend import LLM
from tests.judges.client import questions
from tests.judges.report import Options, Report
from tests.judges.server import ROOT, Server, check_afterwards, serving
from tests.judges.tools import offline_environment, require

PROGRAMS = {
    "LangChain": ("langchain_openai", "langchain_chat"),
    "LlamaIndex": ("llama_index", "llama_index_chat"),
    "litellm": ("litellm", "litellm_chat"),
}
"""By client: its module, and the program of ``tests.judges.programs`` that uses it."""
TASKS = Path(__file__).parent / "tasks" / "humaneval.jsonl"
"""Two problems in the form of HumanEval+, which evalplus would fetch otherwise."""
NUM_SAMPLES = 3


def judge(options: Options, report: Report) -> None:
    question = questions()[0]
    expected = LLM().chat([{"role": "user", "content": question}], quiet=True)[0].text
    with serving(options.url, options.out / "clients.log") as server:
        for name, (module, program) in PROGRAMS.items():
            require(module)
            done = _run(options, "-m", f"tests.judges.programs.{program}", server.url, server.model, question)
            if done.returncode:
                report.check(f"{name} gets an answer", False, done.stderr[-3000:])
                continue
            got = json.loads(done.stdout.splitlines()[-1])
            report.check(f"{name}, whole: the engine's text", got["whole"] == expected, got["whole"])
            report.check(f"{name}, streamed: the engine's text", got["streamed"] == expected, got["streamed"])
        require("evalplus")
        _judge_evalplus(server, options, report)
        check_afterwards(server, report)


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
        done = _run(options, *command, "--base_url", f"{server.url}/v1", "--root", str(root), *flags)
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


def _run(options: Options, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python without network, with the problems of evalplus from this project."""
    environment = offline_environment(options)
    environment |= {
        "HUMANEVAL_OVERRIDE_PATH": str(TASKS),
        "OPENAI_API_KEY": "none",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace")
