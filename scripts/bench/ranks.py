"""Measures what several ranks send each other.

    bench ranks                                the bundled model, tp 2 x bp 2; half a minute
    bench ranks --tp 1 --bp 4 --params window_attention=full --model DIR

Ranks decode held-out problems together, as a server does. What rank 0 sends in each step stands beside a formula over
what the step computed, which tests/dist/test_traffic.py holds it to, and what the formula gives for Dream-7B. In bytes,
where s is the size of a hidden state's number:

  layers      2 (layers - 1) tokens x hidden x s, and for the last layer 2 x hidden x s for each row that is needed
  vocabulary  a few float32 numbers for each predicted position: the shard's best token, its logit, and sums of the
              softmax
  branches    12 for each masked position of the group that has most of them
  kv          with block-causal windows 0; with full windows the keys and values of the committed positions, and one
              hidden state
  control     8, and what arrives from outside
  agreement   32 for each comparison of the ranks' decisions
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean
from typing import TYPE_CHECKING, Any

from lopa_ascend.config import DecodingParams, ModelConfig
from lopa_ascend.core import Request
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.types import SequencePlan, Traffic
from scripts.arguments import InputError, add_numbers, model_directory, named_value
from scripts.bench.plan.models import load_model
from scripts.bench.plan.tasks import element_bytes, kv_bytes_per_position
from scripts.bench.prompts import text_prompts
from scripts.bench.tables import records

if TYPE_CHECKING:
    from lopa_ascend import LLM

PURPOSES = ("layers", "vocabulary", "branches", "kv", "control", "agreement")
CONTROL_BYTES = 8
"""Bytes of a control message without new requests or aborts."""
PREDICTION_BYTES = 12
"""Bytes of one predicted position: token, probability and confidence."""
DIGEST_BYTES = 32
"""Bytes of one comparison of the ranks' decisions."""
PROBLEMS, TOGETHER, NEW_TOKENS = 32, 4, 128
"""Held-out problems that are decoded, how many at a time, and most tokens of an answer."""


@dataclass
class Step:
    """What rank 0 sent in one step, and what the step computed."""

    traffic: dict[str, Traffic] = field(default_factory=dict)
    """By purpose."""
    plans: list[SequencePlan] = field(default_factory=list)
    """Of the sequences that took part."""
    tokens: int = 0
    rows: int = 0
    """Tokens among them whose hidden state after the last layer was needed."""
    scored: list[tuple[int, int]] = field(default_factory=list)
    """Rows and float32 columns of each message about the rank's part of the vocabulary."""

    def sent(self, purpose: str) -> Traffic:
        """What was sent for a purpose, possibly nothing."""
        return self.traffic.get(purpose, Traffic(purpose, 0, 0))

    @property
    def carries_commands(self) -> bool:
        """Whether rank 0 passed new requests or aborts on, and so sent more than the fixed control message."""
        control = self.sent("control")
        return control.num_bytes > CONTROL_BYTES * control.calls


def formulas(step: Step, model: ModelConfig, precision: str, tp: int, bp: int) -> dict[str, int]:
    """Bytes that rank 0 sends for a step, by purpose. "control" is without new requests and aborts; it and "agreement"
    follow from the calls."""
    from lopa_ascend.parallel.placement import Placement

    sent, hidden_state = dict.fromkeys(PURPOSES, 0), model.hidden_size * element_bytes(precision)
    if tp > 1:
        sent["layers"] = 2 * ((model.num_layers - 1) * step.tokens + step.rows) * hidden_state
        sent["vocabulary"] = sum(4 * rows * columns for rows, columns in step.scored)
    if bp > 1:
        placement, masked = Placement(bp), [0] * bp
        for plan in step.plans:
            for branch, row in enumerate(plan.rows):
                masked[placement.home(branch)[0]] += len(row.masked)
            if plan.num_new and placement.sends_values(plan):
                sent["kv"] += plan.num_new * kv_bytes_per_position(model, precision, tp) + hidden_state
        sent["branches"] = PREDICTION_BYTES * max(masked)
    sent["control"] = CONTROL_BYTES * step.sent("control").calls
    sent["agreement"] = DIGEST_BYTES * step.sent("agreement").calls
    return sent


def decode(llm: LLM, requests: Iterable[tuple[Sequence[int], DecodingParams]]) -> list[Step]:
    """Every step of ranks that decode requests together, by token ids of prompts and parameters."""
    from lopa_ascend.runner.scoring import HEAD_ROWS
    from lopa_ascend.score.shards import columns

    engine, steps = llm.engine, list[Step]()

    @contextmanager
    def note(part: str, work: Any) -> Iterator[None]:
        step = steps[-1]
        if part == "exchange":
            step.plans = list(work)
        elif part == "forward":
            step.tokens, step.rows = len(work.tokens), len(work.rows)
        elif part == "score":
            num_rows, scoring = work
            # A last piece of one row is scored as two; a token and its logit follow the columns (see shard_scores).
            score_rows = engine.runner.ops.score_rows or HEAD_ROWS
            step.scored.append((num_rows + (num_rows % score_rows == 1), len(columns(scoring)) + 2))
        yield

    engine.runner.set_probe(note)
    for index, (prompt, params) in enumerate(requests):
        engine.add(Request(str(index), tuple(prompt), params))
    before = {traffic.purpose: traffic for traffic in engine.mesh.traffic()}
    while engine.has_work():
        steps.append(Step())
        engine.step()
        now = {traffic.purpose: traffic for traffic in engine.mesh.traffic()}
        for purpose, all_sent in now.items():
            old = before.get(purpose, Traffic(purpose, 0, 0))
            if calls := all_sent.calls - old.calls:
                steps[-1].traffic[purpose] = Traffic(purpose, calls, all_sent.num_bytes - old.num_bytes)
        before = now
    return steps


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_numbers(
        parser,
        ("--tp", 2, 1, "ranks that split each forward pass"),
        ("--bp", 2, 1, "groups of --tp ranks that take different branches"),
    )
    parser.add_argument(
        "--model",
        type=model_directory,
        default=DEMO_MODEL,
        metavar="MODEL",
        help="a Dream with a chat template (default: the bundled model)",
    )
    params = "decoding parameters, such as num_branches=7"
    parser.add_argument("--params", nargs="+", type=named_value, default=[], metavar="NAME=VALUE", help=params)


def run(args: argparse.Namespace) -> int:
    """Measures and prints."""
    if args.tp * args.bp == 1:
        raise InputError("one rank sends nothing: choose a larger --tp or --bp")
    from lopa_ascend import LLM

    params = DecodingParams(**{"num_branches": 3, "max_new_tokens": NEW_TOKENS, **dict(args.params)})
    options = {"tensor_parallel_size": args.tp, "branch_parallel_size": args.bp, "threads": 1}
    with LLM(args.model, **options, enable_prefix_caching=False, max_num_seqs=TOGETHER) as llm:
        steps = decode(llm, ((prompt, params) for prompt in text_prompts(llm, PROBLEMS)))
    precision = "fp32" if llm.config.dtype == "float32" else "bf16"
    sizes = {"formula": (llm.config, precision), "Dream-7B, bfloat16": (load_model("Dream-7B"), "bf16")}
    by_formula = {name: [formulas(step, *of, args.tp, args.bp) for step in steps] for name, of in sizes.items()}
    rows = []
    for purpose in PURPOSES:
        sent = [step.sent(purpose) for step in steps]
        row = {"purpose": purpose, "calls": f"{mean(t.calls for t in sent):.2f}"}
        row["bytes"] = f"{mean(t.num_bytes for t in sent):,.0f}"
        rows.append(row | {name: f"{mean(one[purpose] for one in found):,.0f}" for name, found in by_formula.items()})
    arrivals = sum(step.carries_commands for step in steps)
    print(f"{PROBLEMS} problems in {len(steps)} steps; control of {arrivals} has new requests in it. A step:\n")
    print(records(rows))
    return 0
