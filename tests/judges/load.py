"""Judge: with guidellm's concurrent clients no request fails, and with ignore_eos each gets exactly its tokens."""

from __future__ import annotations

import json
from typing import Any

from lopa_ascend.demo import DEMO_MODEL
from tests.judges.report import Options, Report
from tests.judges.server import check_afterwards, serving
from tests.judges.tools import run_tool

PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64
"""Tokens of each prompt, and of each answer."""


def judge(options: Options, report: Report) -> None:
    with serving(options.url, options.out / "load.log") as server:
        result = options.out / "guidellm.json"
        arguments = ["run", "--backend", f"kind=openai_http,target={server.url},model={server.model}"]
        arguments += ["--profile", f"kind=concurrent,streams={options.clients}"]
        arguments += ["--constraint", f"kind=max_requests,count={options.requests}"]
        arguments += ["--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"]
        arguments += ["--tokenizer", f"kind=huggingface_auto,model={DEMO_MODEL}", "--disable-progress"]
        # The default prepares 4096 prompts before the first request.
        arguments += ["--data-loader", "kind=pytorch,prefetch_factor=64"]
        arguments += ["--output", f"kind=json,path={result}"]
        done = run_tool("guidellm", *arguments, options=options)
        (options.out / "guidellm.txt").write_text(done.stdout)
        report.check("guidellm finishes", done.returncode == 0, done.stdout[-3000:] if done.returncode else "yes")
        if done.returncode == 0:
            _check(json.loads(result.read_text()), options, report)
        check_afterwards(server, report)


def _check(result: dict[str, Any], options: Options, report: Report) -> None:
    """Judges the JSON that guidellm writes."""
    (benchmark,) = result["benchmarks"]
    expected = {"successful": options.requests, "errored": 0, "incomplete": 0}
    counts = {kind: len(requests or ()) for kind, requests in benchmark["requests"].items() if kind in expected}
    report.check(f"{options.requests} requests from {options.clients} clients", counts == expected, counts)
    tokens = {request["output_metrics"]["text_tokens"] for request in benchmark["requests"]["successful"]}
    report.check(f"{OUTPUT_TOKENS} tokens in each answer", tokens == {OUTPUT_TOKENS}, tokens)
    speed = benchmark["metrics"]["output_tokens_per_second"]["successful"]["mean"]
    print(f"    {speed:.0f} output tokens/s, {benchmark['duration']:.0f} s")
