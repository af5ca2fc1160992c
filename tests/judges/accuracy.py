"""Judge: lm-eval over HTTP finds the accuracy of the engine in this process; likelihoods are refused with a 400."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import httpx

from lopa_ascend import LLM
from lopa_ascend.demo import DEMO_MODEL
from scripts.eval.problems import asked, parse_result, read
from tests.judges.report import Options, Report
from tests.judges.server import ROOT, Server, check_afterwards, serving
from tests.judges.tools import run_tool

CONVERSATIONS = ("lopa_demo_template", "lopa_demo_chat")
"""Tasks whose questions become messages: lm-eval applies the server's chat template to them, or the server does."""
TASKS = Path(__file__).parent / "tasks"
MAX_NEW_TOKENS = 192
"""As in the tasks' ``max_gen_toks``."""
CLIENTS = 16
"""Requests at the same time."""
ROUTES = {
    "lopa_demo_text": ("local-completions", "/v1/completions", f"tokenizer_backend=huggingface,tokenizer={DEMO_MODEL}"),
    "lopa_demo_remote": ("local-completions", "/v1/completions", "tokenizer_backend=remote"),
    "lopa_demo_template": ("local-completions", "/v1/completions", "tokenizer_backend=remote"),
    "lopa_demo_chat": ("local-chat-completions", "/v1/chat/completions", "tokenizer_backend=none"),
}
"""By task: lm-eval's model class, the route that it uses, and its arguments about the tokenizer."""


def judge(options: Options, report: Report) -> None:
    expected = _in_process(options.problems)
    accuracy = sum(right for _, right in expected) / len(expected)
    with serving(options.url, options.out / "accuracy.log") as server:
        for task, (model, route, tokenizer) in ROUTES.items():
            done = _lm_eval(server, options, model, route, task, tokenizer)
            what = f"lm-eval {model} {task}"
            report.check(
                f"{what} finishes without a retry",
                done.returncode == 0,
                done.stdout[-3000:] if done.returncode else "yes",
            )
            if done.returncode == 0:
                found, texts = _results(options.out / task, task)
                report.check(f"{what}: accuracy in this process {accuracy}", found == accuracy, found)
                pairs = [(text, own) for text, (own, _) in zip(texts, expected, strict=True)]
                differ = [(text, own) for text, own in pairs if text != own]
                report.check(f"{what}: texts that differ", not differ, f"{len(differ)} of {len(texts)} {differ[:1]}")
        _check_refusal(server, options, report)
        check_afterwards(server, report)


def _in_process(limit: int) -> list[tuple[str, bool]]:
    """For each problem, the engine's own answer, and whether it is right."""
    problems = read(limit)
    conversations = [asked(question) for question, _ in problems]
    llm = LLM()
    # With what the checkpoint recommends, which the server takes for requests that leave it open.
    outputs = llm.chat(conversations, llm.params(max_new_tokens=MAX_NEW_TOKENS))
    texts = [output.text or "" for output in outputs]
    return [(text, parse_result(text) == result) for text, (_, result) in zip(texts, problems, strict=True)]


def _check_refusal(server: Server, options: Options, report: Report) -> None:
    """Judges a task that asks for log-likelihoods of texts, which a diffusion model does not have."""
    model, route, tokenizer = ROUTES["lopa_demo_text"]
    done = _lm_eval(server, options, model, route, "lopa_demo_choice", tokenizer)
    refused = done.returncode != 0 and "Status code: 400" in done.stdout and '"param":"echo"' in done.stdout
    report.check(
        "lm-eval: a multiple choice task ends with a 400 that names echo",
        refused,
        "yes" if refused else done.stdout[-3000:],
    )
    body = {"prompt": "a", "max_tokens": 1, "logprobs": 1, "echo": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body)
    report.check("log-likelihoods are refused", answer.status_code == 400, answer.text)


def _lm_eval(
    server: Server, options: Options, model: str, route: str, task: str, tokenizer: str
) -> CompletedProcess[str]:
    """Runs lm-eval on a task, with logs, samples and results in ``options.out``.

    Args:
        server: what is evaluated.
        options: the judges' options.
        model: lm-eval's model class.
        route: path on the server.
        task: name of the task.
        tokenizer: arguments about the tokenizer.
    """
    arguments = {
        "model": server.model,
        "base_url": server.url + route,
        "num_concurrent": CLIENTS,
        "max_retries": 1,
        "timeout": 600,
    }
    command = ["run", "--model", model, "--include_path", str(TASKS), "--tasks", task]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items()) + f",{tokenizer}"]
    command += ["--limit", str(options.problems), "--log_samples", "--output_path", str(options.out / task)]
    command += ["--apply_chat_template"] if task in CONVERSATIONS else []
    # The tasks name the problems relative to the project.
    return run_tool("lm_eval", *command, options=options, cwd=ROOT)


def _results(directory: Path, task: str) -> tuple[float, list[str]]:
    """What lm-eval has written: the accuracy, and the answers in the order of the problems."""
    results = json.loads(max(directory.rglob("results_*.json")).read_text())["results"][task]
    lines = max(directory.rglob(f"samples_{task}_*.jsonl")).read_text().splitlines()
    samples: list[dict[str, Any]] = sorted(map(json.loads, lines), key=lambda sample: int(sample["doc_id"]))
    return results["exact_match,result"], [sample["resps"][0][0] for sample in samples]
