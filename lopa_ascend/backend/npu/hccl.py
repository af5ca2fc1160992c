"""Options of HCCL's communicators."""

from __future__ import annotations

import os
from typing import Any

from torch_npu._C._distributed_c10d import ProcessGroupHCCL

EXPANSION_VARIABLE = "HCCL_OP_EXPANSION_MODE"
"""Sets the expansion mode of all communicators that have no option of their own."""
AI_CPU = 2
"""The expansion mode AI_CPU, HCCL's default on a 910C: the device's CPU launches collectives."""
VECTOR_CORES = 3
"""The expansion mode AIV: collectives run on the vector cores, with the least latency for small messages."""


def communicator_options(purpose: str) -> Any:
    """Options of a communicator for the purpose "tp" or "bp"; None for HCCL's defaults.

    By CANN's documents only one communicator of a die may use the vector cores; two of them can wait for each other for
    ever. This is the tensor parallel one, which sums twice a layer, unless the variable says otherwise. All others
    follow the variable, or HCCL's default. Only if the variable is AIV they get AI_CPU instead.
    """
    given = os.environ.get(EXPANSION_VARIABLE)
    if purpose == "tp":
        mode = None if given else VECTOR_CORES
    else:
        mode = AI_CPU if given == "AIV" else None
    if mode is None:
        return None
    options = ProcessGroupHCCL.Options()
    options.hccl_config = {"hccl_op_expansion_mode": mode}
    return options
