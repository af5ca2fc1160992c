"""The decoding strategies: pure policy over positions, tokens and confidences, without torch.

A strategy decodes one sequence with two verbs: ``plan`` says what the next forward pass computes, ``absorb`` takes its
predictions and decides. The golden traces test this definition; compiled steps (``graph/policy``) do the same with
tensors.
"""

from __future__ import annotations

from lopa_ascend.config import add_decoding
from lopa_ascend.decode.block_pipeline import BlockPipeline
from lopa_ascend.decode.canvas import Parallel
from lopa_ascend.decode.causal import Autoregressive, CausalBlocks
from lopa_ascend.decode.fast_dllm import FastDllm
from lopa_ascend.decode.fast_dllm_v2 import FastDllmV2
from lopa_ascend.decode.lengths import Measuring
from lopa_ascend.decode.linear_spec import LinearSpec, LopaLinearSpec
from lopa_ascend.decode.lopa import Lopa, LopaCausalBlocks, LopaFastDllm, LopaFastDllmV2, LopaParallel
from lopa_ascend.decode.s2d2 import S2D2, S2D2FastDllmV2
from lopa_ascend.decode.strategy import SequenceStart, Strategy
from lopa_ascend.decode.vanilla import Vanilla
from lopa_ascend.decode.verified import ExactCausalBlocks, ExactLopa, VerifiedCausalBlocks, VerifiedLopa

over_d2f = (Lopa, VerifiedLopa, ExactLopa)
over_causal_blocks = (LopaCausalBlocks, VerifiedCausalBlocks, ExactCausalBlocks)
add_decoding("lopa", *over_d2f, LopaParallel, LopaFastDllm, LopaFastDllmV2, *over_causal_blocks, LopaLinearSpec)
for strategy in (BlockPipeline, Parallel, Vanilla, FastDllm, FastDllmV2, CausalBlocks, Autoregressive, LinearSpec):
    add_decoding(strategy.base, strategy)

add_decoding("s2d2", S2D2, S2D2FastDllmV2)


def begin(start: SequenceStart) -> Strategy:
    """The strategy that ``start.params`` names, at the start of a sequence."""
    strategy: type[Strategy] = start.params.strategy
    if start.gapped is None:
        return strategy(start)
    assert strategy.fills_gaps, "Limits.check_gaps refuses the others"
    return Measuring(start, strategy) if start.gapped.flexible else strategy(start)


def register_decoding(name: str, strategy: type[Strategy]) -> None:
    """Adds ``name`` to the values of ``DecodingParams.decoding`` in this process (docs/add-a-decoding.md).

    Raises:
        ValueError: the name is taken, or what the class says about itself is incomplete.
        TypeError: ``strategy`` is not a subclass of ``Strategy``.
    """
    if not (isinstance(strategy, type) and issubclass(strategy, Strategy)):
        raise TypeError(f"decoding {name!r} must be a subclass of lopa_ascend.decode.strategy.Strategy")
    add_decoding(name, strategy)
