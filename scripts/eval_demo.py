"""Accuracy and tokens per forward of the bundled model on its held-out problems: a small Figure 4 of the paper.

python -m scripts.eval_demo targets            the four numbers that the model must reach, 500 problems
python -m scripts.eval_demo table --plot F     k by tau_conf by window mode, 200 problems
python -m scripts.eval_demo prefix             what approximate prefix caching does to answers, 50 problems
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lopa_ascend import LLM, DecodingParams
from scripts.demo_problems import parse_result
from scripts.demo_tokenizer import ASSISTANT, EOS, USER

HELD_OUT = Path("lopa_ascend/demo/heldout.jsonl")
ONE_A_STEP = DecodingParams(decoding="d2f", tau_add=1.0, tau_act=1.0, tau_conf=1.0, max_new_tokens=192)
BRANCHES = (0, 1, 3, 7)
TAUS = (0.95, 0.9, 0.8, 0.7)
WINDOWS = ("block_causal", "full")


@dataclass(frozen=True)
class Outcome:
    """Share of exact answers, visible tokens a forward pass (all tokens by all passes), and model tokens a pass."""

    accuracy: float
    tpf: float
    model_tokens: float


def read(limit: int) -> list[tuple[str, int]]:
    rows = [json.loads(line) for line in HELD_OUT.read_text().splitlines()[:limit]]
    return [(row["question"], parse_result(row["answer"]) or 0) for row in rows]


def evaluate(llm: LLM, problems: list[tuple[str, int]], params: DecodingParams) -> Outcome:
    conversations = [[{"role": "user", "content": question}] for question, _ in problems]
    outputs = llm.chat(conversations, params, quiet=True)
    exact = sum(parse_result(o.text or "") == result for o, (_, result) in zip(outputs, problems, strict=True))
    forwards = sum(o.num_forwards for o in outputs)
    tokens = sum(len(o.token_ids) for o in outputs)
    return Outcome(exact / len(problems), tokens / forwards, sum(o.model_tokens for o in outputs) / forwards)


def decoding(k: int, tau_conf: float, window: str = "block_causal") -> DecodingParams:
    kind = "lopa" if k else "d2f"
    return DecodingParams(decoding=kind, num_branches=k, tau_conf=tau_conf, window_attention=window, max_new_tokens=192)


def targets(llm: LLM, limit: int) -> None:
    problems = read(limit)
    runs = {"d2f, one token a step": ONE_A_STEP, "d2f, tau_conf 0.9": decoding(0, 0.9), "lopa, k = 7": decoding(7, 0.9)}
    found = {}
    for name, params in runs.items():
        found[name] = evaluate(llm, problems, params)
        print(f"{name:24s} exact {found[name].accuracy:6.1%}  TPF {found[name].tpf:5.2f}", flush=True)
    d2f, lopa = found["d2f, tau_conf 0.9"], found["lopa, k = 7"]
    print(f"lopa over d2f: {lopa.tpf / d2f.tpf:.2f} times the TPF, {100 * (lopa.accuracy - d2f.accuracy):+.1f} points")


def table(llm: LLM, limit: int, plot: Path | None) -> None:
    problems = read(limit)
    found: dict[tuple[str, int, float], Outcome] = {}
    print(f"| window | k | {' | '.join(f'tau_conf {tau}' for tau in TAUS)} |")
    print(f"|---|---|{'---|' * len(TAUS)}")
    with tqdm(total=len(WINDOWS) * len(BRANCHES) * len(TAUS), disable=None) as bar:
        for window in WINDOWS:
            for k in BRANCHES:
                for tau in TAUS:
                    found[window, k, tau] = evaluate(llm, problems, decoding(k, tau, window))
                    bar.update()
                cells = (f"{found[window, k, t].accuracy:.1%}, {found[window, k, t].tpf:.2f}" for t in TAUS)
                print(f"| {window} | {k} | {' | '.join(cells)} |", flush=True)
    if plot:
        draw(found, plot)


def prefix(model: str | None, limit: int, options: dict[str, Any]) -> None:
    """Prompts that begin with the same solved problems, with the exact cache and with the approximate one."""
    lines = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    shots = "".join(f"{USER}{row['question']}{ASSISTANT}{row['answer']}{EOS}" for row in lines[-4:])
    problems = read(limit)
    texts = []
    for approximate in (False, True):
        llm = LLM(model, approximate_prefix_caching=approximate, max_num_seqs=1, **options)
        prompts = [f"{shots}{USER}{question}{ASSISTANT}" for question, _ in problems]
        outputs = llm.generate(prompts, decoding(3, 0.9), quiet=True)
        exact = sum(parse_result(o.text or "") == result for o, (_, result) in zip(outputs, problems, strict=True))
        reused = sum(o.cached_tokens for o in outputs) / sum(len(o.prompt_token_ids) for o in outputs)
        name = "approximate" if approximate else "exact"
        print(f"{name:12s} exact {exact / len(problems):6.1%}  prompt tokens reused {reused:5.1%}", flush=True)
        texts.append([o.text for o in outputs])
    changed = sum(a != b for a, b in zip(*texts, strict=True))
    print(f"{changed} of {len(problems)} answers changed")


def draw(found: dict[tuple[str, int, float], Outcome], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(WINDOWS), figsize=(10, 4), sharey=True)
    for axis, window in zip(axes, WINDOWS, strict=True):
        for k in BRANCHES:
            points = [found[window, k, tau] for tau in TAUS]
            axis.plot([p.tpf for p in points], [100 * p.accuracy for p in points], marker="o", label=f"k = {k}")
        axis.set(title=window, xlabel="tokens per forward")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("exact answers, %")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["targets", "table", "prefix"])
    parser.add_argument("--model", help="another model directory")
    parser.add_argument("--limit", type=int, help="problems (default 500 for targets, 200 for table, 50 for prefix)")
    parser.add_argument("--plot", type=Path, help="write the table as a picture")
    parser.add_argument("--device", default="cpu", help="cpu or npu")
    parser.add_argument("--dtype", default="auto", help="of the weights: auto, float32 or bfloat16")
    parser.add_argument("--graph-mode", help="how a step runs (default: the engine's)")
    parser.add_argument("--attention-layout", default="TND", help="TND or BSH, on an NPU")
    args = parser.parse_args()
    options = {name: getattr(args, name) for name in ("device", "dtype", "graph_mode", "attention_layout")}
    if args.what == "targets":
        targets(LLM(args.model, **options), args.limit or 500)
    elif args.what == "table":
        table(LLM(args.model, **options), args.limit or 200, args.plot)
    else:
        prefix(args.model, args.limit or 50, options)


if __name__ == "__main__":
    main()
