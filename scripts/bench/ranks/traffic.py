"""Compares what ranks send in each step with formulas over what the step computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import torch

from lopa_ascend import DecodingParams, checkpoint
from lopa_ascend.config import EngineConfig, ModelConfig
from lopa_ascend.families import dream
from lopa_ascend.kv.pages import PAGE_SIZE, slots_for
from lopa_ascend.kv.pool import KVPool
from lopa_ascend.parallel.placement import Placement
from lopa_ascend.text.prompt import Prompts
from lopa_ascend.text.tokenizer_files import load_tokenizer
from scripts.bench.plan.models import load_model
from scripts.bench.prompts import chat, questions
from scripts.bench.ranks.process import Step, TrafficJob, run

PURPOSES = ("layers", "vocabulary", "branches", "kv", "control", "agreement")
BRANCH_PARALLEL_PURPOSES = ("branches", "control", "agreement")
CONTROL_BYTES = 8
"""Bytes of a control message without new requests or aborts."""
PREDICTION_BYTES = 12
"""Bytes of one predicted position: token, probability and confidence."""
DIGEST_BYTES = 32
"""Bytes of one comparison of the ranks' decisions."""


@dataclass(frozen=True)
class Formulas:
    """Bytes that one rank sends for a step, by formulas."""

    model: ModelConfig
    dtype: torch.dtype
    """Number format of hidden states, keys and values."""
    tp: int
    """Tensor parallel size."""
    bp: int
    """Branch parallel size."""

    def exact(self, step: Step) -> dict[str, int]:
        """Bytes by purpose. "control" is without new requests and aborts; it and "agreement" follow from the calls."""
        config, item_size = self.model, self.dtype.itemsize
        sent = dict.fromkeys(PURPOSES, 0)
        if self.tp > 1:
            hidden_states = (config.num_layers - 1) * step.tokens + step.rows
            sent["layers"] = 2 * hidden_states * config.hidden_size * item_size
            sent["vocabulary"] = sum(4 * rows * columns for rows, columns in step.scored)
        if self.bp > 1:
            placement = Placement(self.bp)
            masked_by_group = [0] * self.bp
            for plan in step.plans:
                for branch, row in enumerate(plan.rows):
                    group, _ = placement.home(branch)
                    masked_by_group[group] += len(row.masked)
                if plan.num_new and placement.sends_values(plan):
                    one_hidden_state = config.hidden_size * item_size
                    sent["kv"] += plan.num_new * self.kv_bytes_per_position + one_hidden_state
            sent["branches"] = PREDICTION_BYTES * max(masked_by_group)
        sent["control"] = CONTROL_BYTES * step.sent("control").calls
        sent["agreement"] = DIGEST_BYTES * step.sent("agreement").calls
        return sent

    @property
    def kv_bytes_per_position(self) -> int:
        """Bytes of one position's keys and values on one rank."""
        return KVPool.page_bytes(self.model.kv_shape(self.tp), self.dtype) // PAGE_SIZE

    def layers_at_most(self, step: Step) -> int:
        """Upper bound for "layers"."""
        if self.tp == 1:
            return 0
        return 2 * self.model.num_layers * step.tokens * self.model.hidden_size * self.dtype.itemsize

    def branches_at_most(self, step: Step) -> int:
        """Upper bound for "branches", "control" and "agreement" together, without new requests and aborts."""
        num_positions = 0
        for plan in step.plans:
            num_active = max(row.end for row in plan.rows) - plan.start - plan.num_new
            num_positions += num_active * slots_for(len(plan.rows), self.bp)
        return PREDICTION_BYTES * num_positions + 256


def carries_commands(step: Step) -> bool:
    """Whether rank 0 passed new requests or aborts on, so that it sent more than the fixed control message."""
    control = step.sent("control")
    return control.num_bytes > CONTROL_BYTES * control.calls


def faults(formulas: Formulas, steps: Sequence[Step]) -> list[str]:
    """One line for each deviation of the traffic from the formulas."""
    found = []
    for index, step in enumerate(steps):
        exact = formulas.exact(step)
        sent = {purpose: step.sent(purpose).num_bytes for purpose in PURPOSES}
        if carries_commands(step):
            sent["control"] = exact["control"]
        for purpose in PURPOSES:
            if sent[purpose] != exact[purpose]:
                found.append(f"step {index}: {sent[purpose]} bytes of {purpose}, not {exact[purpose]}")
        found += [f"step {index}: {t.num_bytes} bytes of {t.purpose}" for t in step.traffic if t.purpose not in sent]
        if sent["layers"] > formulas.layers_at_most(step):
            found.append(f"step {index}: {sent['layers']} bytes of layers")
        if sum(sent[purpose] for purpose in BRANCH_PARALLEL_PURPOSES) > formulas.branches_at_most(step):
            found.append(f"step {index}: {sent} is more than {formulas.branches_at_most(step)} bytes for branches")
    return found


def prompts(model: Path, count: int) -> list[list[int]]:
    """The first held-out problems as chat prompts of a model, in token ids."""
    config = checkpoint.open_checkpoint(model, dream.FAMILY).config
    encoder = Prompts(load_tokenizer(model, config.vocab_size), config.vocab_size, config.mask_token_id, model.name)
    return [encoder.encode_chat(chat(question)) for question in questions()[:count]]


def measure(config: EngineConfig, model: Path, params: DecodingParams, num_problems: int) -> bool:
    """Lets ranks decode held-out problems, and prints what they have sent; returns whether the formulas hold.

    Args:
        config: the engine's configuration, with several ranks.
        model: directory of the model.
        params: how every request is decoded.
        num_problems: how many problems are decoded.
    """
    requests = [(prompt, params) for prompt in prompts(model, num_problems)]
    ranks: list[list[Step]] = run(TrafficJob(config, requests), list[Step])
    steps = [step for rank in ranks for step in rank]
    arrivals = [step.sent("control").num_bytes for step in ranks[0] if carries_commands(step)]
    tp, bp = config.tensor_parallel_size, config.branch_parallel_size
    print(
        f"tp {tp} x bp {bp}, k = {params.num_branches}, {params.window_attention} windows, {config.dtype}: "
        f"{num_problems} problems in {len(ranks[0])} steps; in {len(arrivals)} of them rank 0 passed new requests on "
        f"({sum(arrivals):,} bytes).\n"
    )
    formulas = Formulas(checkpoint.open_checkpoint(model, dream.FAMILY).config, getattr(torch, config.dtype), tp, bp)
    for_dream_7b = replace(formulas, model=load_model("Dream-7B"), dtype=torch.bfloat16)
    print_sent(formulas, for_dream_7b, steps)
    found = faults(formulas, steps)
    print(f"\n{len(steps)} steps of ranks, {len(found)} with other bytes than the formula's or more than allowed")
    print("\n".join(found))
    return not found


def print_sent(formulas: Formulas, for_dream_7b: Formulas, steps: Sequence[Step]) -> None:
    """Prints a table of what the ranks have sent, by purpose."""
    exact = [formulas.exact(step) for step in steps]
    scaled = [for_dream_7b.exact(step) for step in steps]
    limits = {"layers": formulas.layers_at_most, "branches": formulas.branches_at_most}
    print("Bytes that a rank sends in a step, the mean of all ranks and steps:\n")
    print("| purpose | calls | bytes | formula | at most | Dream-7B, bfloat16 |\n|---|---|---|---|---|---|")
    for purpose in PURPOSES:
        sent = [step.sent(purpose) for step in steps]
        cells = [
            f"{mean(traffic.calls for traffic in sent):.2f}",
            f"{mean(traffic.num_bytes for traffic in sent):,.1f}",
            f"{mean(num_bytes[purpose] for num_bytes in exact):,.1f}",
            f"{mean(map(limits[purpose], steps)):,.1f}" if purpose in limits else "",
            f"{mean(num_bytes[purpose] for num_bytes in scaled):,.1f}",
        ]
        print(f"| {purpose} | {' | '.join(cells)} |")
