"""Options of HCCL's communicators."""

from __future__ import annotations

import os
from typing import Any

from torch_npu._C._distributed_c10d import ProcessGroupHCCL

EXPANSION_VARIABLE = "HCCL_OP_EXPANSION_MODE"
"""Sets the expansion mode of all communicators of a process."""
VECTOR_CORES = 3
"""The expansion mode AIV: collectives run on the vector cores, with the least latency for small messages."""


def communicator_options(purpose: str) -> Any:
    """Options of a communicator.

    By CANN's documents only one communicator of a die may use the vector cores. This is the tensor parallel one, which
    sums twice a layer; all others keep HCCL's default. If the variable is set, it holds for all of them.

    Args:
        purpose: "tp" or "bp".

    Returns:
        Options for ``torch.distributed``; None for HCCL's defaults.
    """
    if purpose != "tp" or os.environ.get(EXPANSION_VARIABLE):
        return None
    options = ProcessGroupHCCL.Options()
    options.hccl_config = {"hccl_op_expansion_mode": VECTOR_CORES}
    return options
