"""Tokens/s from the time of a step, and the best way to use a number of dies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lopa_ascend.config import ModelConfig
from scripts.arguments import InputError
from scripts.bench.plan.devices import Range
from scripts.bench.plan.step import ENDS, Step, predict
from scripts.bench.plan.tasks import Workload, memory_bytes

DEFAULT_TPF: Mapping[int, float] = {0: 3.1, 14: 10.1}
"""Lookahead branches -> tokens per forward pass: D2F-Dream on GSM8K (Table 1 of the paper; 14 branches by Table 5)."""


@dataclass(frozen=True)
class Plan:
    """One way to use the dies."""

    work: Workload
    """Of each replica."""
    replicas: int
    requests: int
    """Of all replicas together."""
    steps: dict[str, Step]
    """At both ends of the range."""

    def tokens_per_second(self, end: str) -> float:
        """Of all requests together, with the step at an end of its range."""
        return self.requests * self.work.tpf / self.steps[end].step

    @property
    def middle(self) -> float:
        """The geometric mean of tokens/s at both ends."""
        return math.prod(map(self.tokens_per_second, ENDS)) ** 0.5

    def as_json(self) -> dict[str, Any]:
        """The plan, with steps in milliseconds."""
        found: dict[str, Any] = {
            "tp": self.work.tp,
            "bp": self.work.bp,
            "k": self.work.k,
            "replicas": self.replicas,
            "dies": self.replicas * self.work.tp * self.work.bp,
            "tpf": round(self.work.tpf, 3),
        }
        for end in ENDS:
            found[end] = {**self.steps[end].as_json(), "tokens_per_second": round(self.tokens_per_second(end), 1)}
        return found


def tokens_per_forward(known: Mapping[int, float], k: int) -> float:
    """Tokens per forward pass with k lookahead branches, between known numbers linear in log2(k + 1). Nothing is
    extrapolated: InputError for k outside the known numbers."""
    if not min(known) <= k <= max(known):
        given = ", ".join(f"{n}:{tpf:g}" for n, tpf in sorted(known.items()))
        raise InputError(f"no tokens per forward pass for k = {k}: known are {given}; give more by --tpf, as {k}:X")
    numbers = sorted(known)
    return float(np.interp(math.log2(k + 1), [math.log2(n + 1) for n in numbers], [known[n] for n in numbers]))


def plan(model: ModelConfig, devices: Range, work: Workload, tpf: float, dies: int | None = None) -> Plan:
    """How fast a workload is, whose ``requests`` are those of all replicas together; without ``dies`` there is one.
    InputError if it does not fit the model, the dies or their memory."""
    size = work.tp * work.bp
    if dies is not None and size > dies:
        raise InputError(f"tp {work.tp} x bp {work.bp} needs {size} dies, there are {dies}")
    replicas = 1 if dies is None else min(dies // size, work.requests)
    each = replace(work, requests=-(-work.requests // replicas), tpf=tpf)
    needed = memory_bytes(model, each)
    if needed > devices.low.memory_bytes:
        raise InputError(
            f"tp {work.tp} x bp {work.bp} needs {needed / 2**30:.1f} GiB a die, there are "
            f"{devices.low.memory_bytes / 2**30:.1f} GiB"
        )
    return Plan(each, replicas, work.requests, predict(model, devices, each))


def all_plans(
    model: ModelConfig,
    devices: Range,
    work: Workload,
    known_tpf: Mapping[int, float],
    dies: int | None,
    given: Mapping[str, int],
) -> list[Plan]:
    """Every (tp, bp, k) that fits on the dies, in place of those of ``work``; InputError if none does.

    Args:
        known_tpf: tokens per forward pass by k; no k outside these is tried.
        given: "tp", "bp" and "k" that all plans must have; those without one are searched.
    """
    tried: dict[str, Iterable[int]] = {
        "tp": model.tensor_parallel_sizes(),
        "bp": range(1, (dies or 1) + 1),
        "k": range(min(known_tpf), max(known_tpf) + 1),
    }
    tried |= {name: [size] for name, size in given.items()}
    found, problems = list[Plan](), list[InputError]()
    for tp, bp, k in itertools.product(*tried.values()):
        if bp > k + 1 and len(given) < len(tried):  # ranks would be idle
            continue
        try:
            each = replace(work, tp=tp, bp=bp, k=k)
            found.append(plan(model, devices, each, tokens_per_forward(known_tpf, k), dies))
        except InputError as error:  # such as the memory of a die
            problems.append(error)
    if not found:
        raise InputError(f"no (tp, bp, k) is possible: {problems[0] if problems else 'bp is at most k + 1'}")
    return found


def best_plan(plans: Iterable[Plan]) -> Plan:
    """That with most tokens/s in the middle of the range; of equal ones that with fewest dies and branches."""
    return max(plans, key=lambda found: (found.middle, -found.replicas * found.work.tp * found.work.bp, -found.work.k))
