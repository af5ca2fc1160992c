"""Measures what several ranks send each other.

    bench ranks                                the bundled model, tp 2 x bp 2; half a minute
    bench ranks --tp 1 --bp 4 --window full --model DIR

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
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import TYPE_CHECKING, Any

from lopa_ascend.config import DecodingParams, ModelConfig
from lopa_ascend.decode.block_pipeline import WINDOW_ATTENTIONS
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.types import SequencePlan, Traffic
from scripts.arguments import add_numbers, model_directory
from scripts.bench.plan.models import load_model
from scripts.bench.prompts import text_prompts
from scripts.bench.tables import table

if TYPE_CHECKING:
    from lopa_ascend import LLM
    from lopa_ascend.engine.engine import Engine

PURPOSES = ("layers", "vocabulary", "branches", "kv", "control", "agreement")
CONTROL_BYTES = 8
"""Bytes of a control message without new requests or aborts."""
PREDICTION_BYTES = 12
"""Bytes of one predicted position: token, probability and confidence."""
DIGEST_BYTES = 32
"""Bytes of one comparison of the ranks' decisions."""
BYTES_OF = {"float32": 4, "bfloat16": 2}
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


@dataclass(frozen=True)
class Formulas:
    """Bytes that rank 0 sends for a step."""

    model: ModelConfig
    item_size: int
    """Bytes of a number of hidden states, keys and values."""
    tp: int
    bp: int

    def exact(self, step: Step) -> dict[str, int]:
        """Bytes by purpose. "control" is without new requests and aborts; it and "agreement" follow from the calls."""
        from lopa_ascend.parallel.placement import Placement

        sent, hidden_state = dict.fromkeys(PURPOSES, 0), self.model.hidden_size * self.item_size
        if self.tp > 1:
            sent["layers"] = 2 * ((self.model.num_layers - 1) * step.tokens + step.rows) * hidden_state
            sent["vocabulary"] = sum(4 * rows * columns for rows, columns in step.scored)
        if self.bp > 1:
            placement, masked = Placement(self.bp), [0] * self.bp
            for plan in step.plans:
                for branch, row in enumerate(plan.rows):
                    masked[placement.home(branch)[0]] += len(row.masked)
                if plan.num_new and placement.sends_values(plan):
                    sent["kv"] += plan.num_new * self.kv_bytes + hidden_state
            sent["branches"] = PREDICTION_BYTES * max(masked)
        sent["control"] = CONTROL_BYTES * step.sent("control").calls
        sent["agreement"] = DIGEST_BYTES * step.sent("agreement").calls
        return sent

    @property
    def kv_bytes(self) -> int:
        """Bytes of one position's keys and values on one rank."""
        return 2 * self.model.num_layers * self.model.local_kv_heads(self.tp) * self.model.head_dim * self.item_size


@contextmanager
def recording(engine: Engine) -> Iterator[list[Step]]:
    """Collects the steps of an engine."""
    from lopa_ascend.runner.scoring import HEAD_ROWS
    from lopa_ascend.score.shards import columns

    steps, current = list[Step](), Step()
    step, runner = engine.step, engine.runner
    sent = {traffic.purpose: traffic for traffic in engine.mesh.traffic()}

    @contextmanager
    def note(part: str, work: Any) -> Iterator[None]:
        if part == "exchange":
            current.plans = list(work)
        elif part == "forward":
            current.tokens, current.rows = len(work.tokens), len(work.rows)
        elif part == "score":
            num_rows, scoring = work
            # A last piece of one row is scored as two; a token and its logit follow the columns (see shard_scores).
            score_rows = runner.ops.score_rows or HEAD_ROWS
            current.scored.append((num_rows + (num_rows % score_rows == 1), len(columns(scoring)) + 2))
        yield

    def recorded() -> Any:
        nonlocal current, sent
        updates = step()
        now = {traffic.purpose: traffic for traffic in engine.mesh.traffic()}
        for purpose, all_sent in now.items():
            before = sent.get(purpose, Traffic(purpose, 0, 0))
            if calls := all_sent.calls - before.calls:
                current.traffic[purpose] = Traffic(purpose, calls, all_sent.num_bytes - before.num_bytes)
        steps.append(current)
        current, sent = Step(), now
        return updates

    runner.set_probe(note)
    engine.step = recorded  # type: ignore[method-assign]
    yield steps


def decode(llm: LLM, requests: Iterable[tuple[Sequence[int], DecodingParams]]) -> list[Step]:
    """Every step of ranks that decode requests together, by token ids of prompts and parameters."""
    from lopa_ascend.core import Request

    with recording(llm.engine) as steps:
        for index, (prompt, params) in enumerate(requests):
            llm.engine.add(Request(str(index), tuple(prompt), params))
        while llm.engine.has_work():
            llm.engine.step()
    return steps


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_numbers(
        parser,
        ("--tp", 2, 1, "ranks that split each forward pass"),
        ("--bp", 2, 1, "groups of --tp ranks that take different branches"),
        ("--branches", 3, 0, "lookahead branches"),
    )
    parser.add_argument(
        "--model",
        type=model_directory,
        default=DEMO_MODEL,
        metavar="MODEL",
        help="a Dream with a chat template (default: the bundled model)",
    )
    parser.add_argument(
        "--window", default="block_causal", choices=WINDOW_ATTENTIONS, help="window attention (default: block_causal)"
    )


def run(args: argparse.Namespace) -> int:
    """Measures and prints."""
    if args.tp * args.bp == 1:
        raise ValueError("one rank sends nothing: choose a larger --tp or --bp")
    from lopa_ascend import LLM

    params = DecodingParams(num_branches=args.branches, max_new_tokens=NEW_TOKENS, window_attention=args.window)
    options = {"tensor_parallel_size": args.tp, "branch_parallel_size": args.bp, "threads": 1}
    with LLM(args.model, **options, enable_prefix_caching=False, max_num_seqs=TOGETHER) as llm:
        steps = decode(llm, ((prompt, params) for prompt in text_prompts(llm, PROBLEMS)))
    formulas = Formulas(llm.config, BYTES_OF[llm.config.dtype], args.tp, args.bp)
    dream = replace(formulas, model=load_model("Dream-7B"), item_size=BYTES_OF["bfloat16"])
    exact, scaled = ([each.exact(step) for step in steps] for each in (formulas, dream))
    rows = []
    for purpose in PURPOSES:
        sent = [step.sent(purpose) for step in steps]
        means = (mean(t.num_bytes for t in sent), *(mean(each[purpose] for each in found) for found in (exact, scaled)))
        rows.append([purpose, f"{mean(t.calls for t in sent):.2f}", *(f"{value:,.0f}" for value in means)])
    arrivals = sum(step.carries_commands for step in steps)
    print(f"{PROBLEMS} problems in {len(steps)} steps; control of {arrivals} has new requests in it. A step:\n")
    print(table(("purpose", "calls", "bytes", "formula", "Dream-7B, bfloat16"), rows))
    return 0
