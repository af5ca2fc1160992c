"""The decode policy as tensor functions of fixed shape, for use inside a compiled step.

``decode/`` is the definition; this does the same for all sequences of a step at once and reads no value on the host. A
step is ``unpack_state``, ``branch_rows`` (what each branch holds), ``rows_of_group`` (what this rank computes), in a
packed bucket ``layout`` (which blocks of that), the forward pass, ``advance`` (winner, fills, next branches) and
``pack_state``. ``graph/inputs.py`` is the host's part.

A **cell** is the place of a generated position, numbered block * L + offset from the end of the prompt on, in blocks of
L cells. Blocks may be shorter than L, and a sequence's last block shorter still; cells after the end of their block
hold no position.

Row i of a sequence is branch i in evaluation order: lookahead branches by rank, then the anchor, then padding.

Shapes are written with S sequences, B branches of a sequence, R slots (branches on one rank), W blocks of the window, L
cells of a block and C = W * L cells of the window. Some ops have no kernel on an NPU's vector cores: maxima of int32,
selections of bool, sorts of integers. So counts of masks are float32, and confidences are ranked before ``topk``.

A confidence may be NaN. All indices stay inside their range then, and other sequences are not affected.
"""

from lopa_ascend.graph.policy.advance import Predicted, advance
from lopa_ascend.graph.policy.packed import Layout, Packing, layout
from lopa_ascend.graph.policy.rows import (
    Constants,
    Launch,
    RequestParams,
    Rows,
    State,
    branch_rows,
    pack_state,
    rows_of_group,
    unpack_state,
)

__all__ = [
    "Constants",
    "Launch",
    "Layout",
    "Packing",
    "Predicted",
    "RequestParams",
    "Rows",
    "State",
    "advance",
    "branch_rows",
    "layout",
    "pack_state",
    "rows_of_group",
    "unpack_state",
]
