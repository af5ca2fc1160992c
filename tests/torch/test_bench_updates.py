"""The count of the KV lengths that an NPU would have to write into its graphs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from scripts.bench_updates import Counting, main
from tests.versions import compiles_steps


def test_lengths_are_compared_with_those_of_the_last_step_of_the_same_bucket() -> None:
    def step(tensors: Sequence[Tensor], kv_lengths: Sequence[int]) -> Tensor:
        return torch.tensor(kv_lengths)

    counting = Counting()
    first = counting.compile(step, "first", [], [9, 9])
    second = counting.compile(step, "second", [], [9, 9])
    for run, kv_lengths in ((first, [9, 9]), (first, [9, 10]), (second, [9, 10]), (first, [9, 10]), (second, [9, 9])):
        assert run(kv_lengths).tolist() == kv_lengths
    assert (counting.num_replays, counting.num_changed, counting.num_pages_changed) == (5, 3, 0)
    first([9, 129])
    assert (counting.num_changed, counting.num_pages_changed) == (4, 1)


@compiles_steps
def test_the_bundled_model_keeps_lengths_in_some_steps(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--problems", "24"])
    replays, inputs, before, after, pages = capsys.readouterr().out.splitlines()
    assert replays.startswith("24 problems, ")
    assert 0 < int(inputs.removeprefix("inputs written before ").split("%")[0]) < 100
    assert before == "before, all lengths written  28.0 updates a step, 5.15 ms of the host"
    assert 0 < float(after.split("written")[1].split()[0]) < 28
    assert pages.startswith("if lengths were whole pages ")
