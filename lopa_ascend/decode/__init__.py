"""The decoding strategies: pure policy over positions, tokens and confidences, without torch.

A strategy decodes one sequence and has two verbs: ``plan`` says what the next forward pass computes, ``absorb`` takes
the predictions of that pass and decides. This is the definition of the decoding, which the golden traces test; compiled
steps do the same with tensors (``graph/policy.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from lopa_ascend.config import DecodingParams
from lopa_ascend.decode.d2f import D2F
from lopa_ascend.decode.lopa import Lopa
from lopa_ascend.decode.verified import ExactLopa, VerifiedLopa

BRANCH_ACCEPTANCES: dict[str, type[Lopa]] = {"published": Lopa, "verified": VerifiedLopa, "exact": ExactLopa}


def begin(prompt: Sequence[int], params: DecodingParams, mask: int, eos: frozenset[int], num_committed: int = 0) -> D2F:
    """The strategy that ``params`` names, at the start of a sequence; for the arguments see ``D2F``."""
    strategy = D2F if params.decoding == "d2f" else BRANCH_ACCEPTANCES[params.branch_acceptance]
    return strategy(prompt, params, mask, eos, num_committed)
