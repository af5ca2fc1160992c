"""The decoding strategies: pure policy over positions, tokens and confidences, without torch.

A strategy decodes one sequence and has two verbs: ``plan`` says what the next forward pass computes, ``absorb`` takes
the predictions of that pass and decides. This is the definition of the decoding, which the golden traces test; compiled
steps do the same with tensors (``graph/policy``).
"""

from __future__ import annotations

from lopa_ascend.config import add_decoding, find_decoding
from lopa_ascend.decode.canvas import Parallel
from lopa_ascend.decode.d2f import D2F
from lopa_ascend.decode.fast_dllm import FastDllm
from lopa_ascend.decode.fast_dllm_v2 import FastDllmV2
from lopa_ascend.decode.lengths import Measuring
from lopa_ascend.decode.lopa import Lopa, LopaFastDllm, LopaFastDllmV2, LopaParallel
from lopa_ascend.decode.strategy import Start, Strategy
from lopa_ascend.decode.vanilla import Vanilla
from lopa_ascend.decode.verified import ExactLopa, VerifiedLopa

STRATEGIES: dict[str, type[Strategy]] = {
    "lopa": Lopa,
    "d2f": D2F,
    "parallel": Parallel,
    "vanilla": Vanilla,
    "fast_dllm": FastDllm,
    "fast_dllm_v2": FastDllmV2,
}
"""By ``DecodingParams.decoding``."""
BRANCH_ACCEPTANCES: dict[str, type[Lopa]] = {"published": Lopa, "verified": VerifiedLopa, "exact": ExactLopa}
"""What decodes as "lopa" over "d2f", by ``DecodingParams.branch_acceptance``."""
LOPA_OVER: dict[str, type[Strategy]] = {
    "parallel": LopaParallel,
    "fast_dllm": LopaFastDllm,
    "fast_dllm_v2": LopaFastDllmV2,
}
"""What decodes as "lopa" over other decodings, by ``DecodingParams.base``."""


def begin(start: Start) -> Strategy:
    """The strategy that ``start.params`` names, at the start of a sequence."""
    params = start.params
    strategy: type[Strategy] | None
    if params.decoding != "lopa":
        strategy = STRATEGIES.get(params.decoding) or find_decoding(params.decoding)
    elif params.base == "d2f":
        strategy = BRANCH_ACCEPTANCES[params.branch_acceptance]
    else:
        strategy = LOPA_OVER[params.base]
    assert strategy is not None, "DecodingParams checks the name"
    assert start.gapped is None or strategy.fills_gaps, "Limits.check_gaps refuses the others"
    if start.gapped is not None and start.gapped.flexible:
        return Measuring(start, strategy)
    return strategy(start)


def register_decoding(name: str, strategy: type[Strategy]) -> None:
    """Adds a decoding that requests of this process can name (docs/add-a-decoding.md).

    Args:
        name: the value of ``DecodingParams.decoding`` that selects it.
        strategy: how a sequence is decoded. Its attribute ``like`` names the built-in decoding whose parameters it
            accepts. If that is "lopa", requests may ask for lookahead branches. ``parameters`` declares further ones.

    Raises:
        ValueError: the name is taken, or ``like`` is not a built-in decoding.
        TypeError: ``strategy`` is not a subclass of ``Strategy``.
    """
    if not (isinstance(strategy, type) and issubclass(strategy, Strategy)):
        raise TypeError(f"decoding {name!r} must be a subclass of lopa_ascend.decode.strategy.Strategy")
    add_decoding(name, strategy)
