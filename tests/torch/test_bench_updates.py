"""The count of the KV lengths that an NPU would have to write into its graphs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from scripts.bench_updates import LAYERS, Counting, main
from scripts.npu_predict import INPUTS_WRITTEN, WRITTEN
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
def test_the_predicted_step_writes_about_as_much_as_the_bundled_model_does(capsys: pytest.CaptureFixture[str]) -> None:
    """A model that fills more or fewer positions a step needs both constants, and docs/predicted-step.md, anew."""
    main(["--problems", "24", "--block-size", "32"])
    replays, inputs, before, after, pages = capsys.readouterr().out.splitlines()
    assert replays.startswith("24 problems in blocks of 32, ")
    inputs_written = int(inputs.removeprefix("inputs written before ").split("%")[0]) / 100
    assert inputs_written == pytest.approx(INPUTS_WRITTEN, abs=0.15)
    assert before == "before, all lengths written  28.0 updates a step, 5.15 ms of the host"
    assert float(after.split("written")[1].split()[0]) / LAYERS == pytest.approx(WRITTEN, abs=0.15)
    assert pages.startswith("if lengths were whole pages ")


@compiles_steps
def test_the_blocks_are_those_that_the_model_recommends_unless_others_are_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Shorter blocks are committed more often, and every commit changes lengths."""
    found = []
    for options, block_size in (([], 8), (["--block-size", "64"], 64)):
        main(["--problems", "3", *options])
        problems, replays, _ = capsys.readouterr().out.splitlines()[0].split(", ")
        assert problems == f"3 problems in blocks of {block_size}"
        found.append(int(replays.removesuffix(" replays")))
    assert found[0] > found[1] > 0


@pytest.mark.parametrize(
    ("size", "message"),
    [("0", "must be a whole number from 1 on, got '0'"), ("4097", "must be an integer from 1 to 4096, got 4097")],
)
def test_blocks_of_no_or_too_many_positions_are_refused(
    capsys: pytest.CaptureFixture[str], size: str, message: str
) -> None:
    with pytest.raises(SystemExit):
        main(["--block-size", size])
    assert f"--block-size: {message}" in capsys.readouterr().err
