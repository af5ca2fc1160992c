"""Counts how often an NPU would have to write KV lengths into its captured graphs, on this CPU.

    python -m scripts.bench_updates                   the 500 held-out problems, one at a time
    python -m scripts.bench_updates --problems 24 --sequences 4
    python -m scripts.bench_updates --block-size 32   what docs/predicted-step.md assumes

Decodes held-out problems by the bundled model with the decode steps that graph mode npugraph_ex captures, in the same
buckets, without capturing them. The shorter the blocks, the more often lengths change.

Prints the share of the steps whose inputs must be written to the device because they differ from those of the step
before. Then prints how many attention kernels get new KV lengths in a step, and what that costs the host:

  before         every replay writes all its lengths
  after          a replay writes its lengths only if they differ from those of the graph's last replay
  whole pages    as after, if lengths were rounded up to whole pages; the kernel would then need a mask

Counted for the 28 layers of Dream-7B with one attention kernel a layer. An update is priced at 184 us, as measured by
vllm-ascend on a 910B3 (docs/ascend.md, Host time of a replay).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from unittest import mock

import torch
from torch import Tensor

from lopa_ascend import LLM, DecodingParams, ParameterError
from lopa_ascend.backend.compiler import Eager, Run, Step
from lopa_ascend.config import GraphParams, recommended_decoding
from lopa_ascend.config.help import HelpFormatter
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.graph import setup
from lopa_ascend.kv.pages import pages_for
from scripts.arguments import number_from
from scripts.demo_sets import asked, read

LAYERS = 28
UPDATE_MILLISECONDS = 0.184


class Counting(Eager):
    """Compiles nothing, and compares the KV lengths of each step with those of the bucket's last one.

    Attributes:
        num_replays: steps that were run.
        num_changed: those of them with other KV lengths than the bucket's last step.
        num_pages_changed: those with other numbers of pages than it.
        num_written: how often the inputs of a step were written to the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        """Counts from 0 again."""
        self.num_replays = self.num_changed = self.num_pages_changed = self.num_written = 0

    def _compile(self, step: Step, name: str, tensors: Sequence[Tensor], kv_lengths: list[int]) -> Run:
        run, last = super()._compile(step, name, tensors, kv_lengths), list(kv_lengths)

        def counted(kv_lengths: Sequence[int]) -> Tensor:
            nonlocal last
            self.num_replays += 1
            self.num_changed += list(kv_lengths) != last
            self.num_pages_changed += list(map(pages_for, kv_lengths)) != list(map(pages_for, last))
            last = list(kv_lengths)
            return run(kv_lengths)

        return counted


def decoding_params(block_size: int | None) -> DecodingParams:
    """How the problems are decoded.

    Args:
        block_size: positions in a block; None: as many as the bundled model recommends.
    """
    chosen = {} if block_size is None else {"block_size": block_size}
    return DecodingParams(**{**recommended_decoding(DEMO_MODEL), **chosen, "max_new_tokens": 128})


def count(questions: Sequence[str], num_sequences: int, params: DecodingParams) -> Counting:
    """Decodes the questions, and counts the KV lengths that change."""
    counting = Counting()
    with mock.patch.object(setup, "load_compiler", return_value=counting):
        llm = LLM(
            graph_mode="inductor",
            max_num_seqs=num_sequences,
            max_model_len=512,
            enable_prefix_caching=False,
            graph_params=GraphParams.of(params),
        )
    counting.reset()  # without the padding that buckets start with
    chats = [asked(question) for question in questions]
    graphs = llm.engine.runner.graphs
    assert graphs is not None
    before = graphs.inputs.num_written
    llm.chat(chats, params)
    counting.num_written = graphs.inputs.num_written - before
    return counting


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench_updates", description=__doc__, formatter_class=HelpFormatter
    )
    parser.add_argument(
        "--problems", type=number_from(1), default=500, metavar="N", help="held-out problems (default: 500)"
    )
    parser.add_argument(
        "--sequences", type=number_from(1), default=1, metavar="N", help="problems decoded at a time (default: 1)"
    )
    recommended = decoding_params(None).block_size
    parser.add_argument(
        "--block-size",
        type=number_from(1),
        metavar="N",
        help=f"positions in a block (default: what the bundled model recommends, {recommended})",
    )
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        params = decoding_params(arguments.block_size)
    except ParameterError as error:
        parser.error(f"--block-size: {str(error).removeprefix('block_size: ')}")
    questions = [question for question, _ in read(arguments.problems)]
    torch.set_num_threads(1)
    counting = count(questions, arguments.sequences, params)
    changed = counting.num_changed / counting.num_replays
    print(
        f"{len(questions)} problems in blocks of {params.block_size}, {counting.num_replays} replays, "
        f"{1 - changed:.0%} with the lengths of the last one"
    )
    print(f"inputs written before {counting.num_written / counting.num_replays:.0%} of the replays")
    pages = counting.num_pages_changed / counting.num_replays
    shares = (
        ("before, all lengths written", 1.0),
        ("after, new lengths written", changed),
        ("if lengths were whole pages", pages),
    )
    for name, share in shares:
        updates = LAYERS * share
        print(f"{name:28} {updates:4.1f} updates a step, {UPDATE_MILLISECONDS * updates:.2f} ms of the host")


if __name__ == "__main__":
    main()
