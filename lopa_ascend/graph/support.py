"""Which requests the compiled steps of an engine can decode."""

from __future__ import annotations

import math
from dataclasses import replace

from lopa_ascend.config import DecodingParams, GraphParams, GraphSupport
from lopa_ascend.graph.buckets import MAX_EOS, Bucket


def unsupported(request: DecodingParams, num_ends: int, shape: Bucket, compiled: GraphParams) -> str | None:
    """The field of a request that no graph of this shape supports; None if graphs can decode the request. Each field of
    ``DecodingParams`` declares which values graphs support. ``num_ends``: token ids that end the request."""
    sizes: dict[str, tuple[float, int]] = {  # (what the request needs, what the graphs hold)
        # A graph computes the number of its branches itself; the host cannot choose it.
        "num_branches": (math.inf if request.is_auto else 1 + request.lookaheads, shape.branches),
        "block_size": (request.block_size, shape.block_length),
        # EOS ids share their places with stop_token_ids, which are named where only both together are too many.
        "eos_token_id": (num_ends - len(request.stop_token_ids), MAX_EOS),
        "stop_token_ids": (num_ends, MAX_EOS),
    }
    if (name := request.eager_parameter) is not None:
        return name
    for name, parameter in DecodingParams.parameters().items():
        if parameter.graphs is GraphSupport.COMPILED and not _decodes(compiled, request, name):
            return name
        if parameter.graphs is GraphSupport.BUCKET:
            needed, held = sizes[name]
            if needed > held:
                return name
    return None


def _decodes(compiled: GraphParams, request: DecodingParams, name: str) -> bool:
    """Whether graphs decode the value of a field that is compiled into all of them."""
    if name == "branch_acceptance" and not request.lookaheads:
        return True  # the anchor wins
    return bool(getattr(request, name) == getattr(compiled, name))


def with_fixed_branches(request: DecodingParams, num_ends: int, shape: Bucket, compiled: GraphParams) -> DecodingParams:
    """Gives a request with ``num_branches`` "auto" a fixed number of lookahead branches, so that graphs can decode it.
    Only with ``branch_acceptance`` "exact", which makes the tokens independent of the number of branches, and only if
    graphs can decode the result. Any other request is returned as it is."""
    max_lookaheads = shape.branches - 1
    is_exact = request.branch_acceptance == compiled.branch_acceptance == "exact"
    if not (request.is_auto and is_exact and max_lookaheads):
        return request
    fixed = replace(request, num_branches=min(request.lookaheads, max_lookaheads))
    return request if unsupported(fixed, num_ends, shape, compiled) else fixed
