"""The times of steps that a device measures of itself: ranks with different clocks make the same steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lopa_ascend import LLM
from lopa_ascend.engine import step_costs
from lopa_ascend.engine.step_costs import measure_step_costs
from lopa_ascend.parallel.collectives import Group
from tests.tiny import write_dream


@dataclass(frozen=True)
class Recorded(Group):
    """Rank 0's broadcasts: kept on rank 0, and given to another rank."""

    values: list[Tensor] = field(default_factory=list)
    given: Iterator[Tensor] | None = None

    def broadcast(self, x: Tensor, source: int, purpose: str) -> Tensor:
        if self.given is not None:
            return next(self.given)
        self.values.append(x)
        return x


@pytest.mark.parametrize("slower", [0.01, 100])
def test_ranks_make_equally_many_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slower: float) -> None:
    runner = LLM(write_dream(tmp_path)).engine.runner
    forward, sizes = runner.model.forward, []

    def counted(inputs: Any, *caches: Any) -> Tensor:
        sizes.append(len(inputs.tokens))
        return forward(inputs, *caches)

    monkeypatch.setattr(runner.model, "forward", counted)
    monkeypatch.setattr(step_costs, "ENOUGH", 0.002)  # between one step and five
    world = Recorded()
    costs = measure_step_costs(runner, 128, world)
    made, real = list(sizes), time.perf_counter_ns
    sizes.clear()
    monkeypatch.setattr(time, "perf_counter_ns", lambda: int(real() * slower))
    given = iter(world.values)
    others = measure_step_costs(runner, 128, Recorded(given=given))
    assert sizes == made
    assert not list(given)
    assert [others.seconds(n) for n in (32, 64, 200)] == [costs.seconds(n) for n in (32, 64, 200)]


def test_rows_have_pages_of_their_own_as_in_real_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One attention kernel of an NPU takes as many rows as there are pages. Each size is measured twice at least."""
    runner = LLM(write_dream(tmp_path)).engine.runner
    forward, sizes = runner.model.forward, []

    def checked(inputs: Any, keys: Any, values: Any) -> Tensor:
        sizes.append(len(inputs.tokens))
        pages = inputs.entries.page_tables.flatten().tolist()
        assert sorted(pages) == list(range(len(keys[0])))
        assert len(inputs.slot_mapping.unique()) == len(inputs.tokens)
        return forward(inputs, keys, values)

    monkeypatch.setattr(runner.model, "forward", checked)
    monkeypatch.setattr(step_costs, "ENOUGH", 0)
    measure_step_costs(runner, 128, Recorded())
    assert sizes == [32, 32, 64, 64, 128, 128]
