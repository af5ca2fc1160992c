"""Options of HCCL's communicators."""

from __future__ import annotations

import os
from typing import Any

from torch_npu._C._distributed_c10d import ProcessGroupHCCL

from lopa_ascend.config import ParameterError

EXPANSION_VARIABLE, BUFFER_VARIABLE = "HCCL_OP_EXPANSION_MODE", "HCCL_BUFFSIZE"
"""Set the expansion mode, and the MB of a buffer, of all communicators that have no option of their own."""
TP_VARIABLE = "LOPA_TP_EXPANSION_MODE"
"""Sets the mode of the tensor parallel communicator alone. HCCL would give AIV_ONLY to all of them."""
BUFFER_MB = 64
"""A communicator takes twice this from a die. The largest message of a default step has 56 MiB, and HCCL sends larger
ones in pieces."""
AI_CPU = 2
"""The expansion mode AI_CPU, HCCL's default on a 910C: the device's CPU launches collectives."""
VECTOR_CORES = 3
"""The expansion mode AIV: collectives run on the vector cores, with the least latency for small messages. Larger ones
(of sums, above 1 MiB a rank) run as with AI_CPU."""
VECTOR_CORES_ALONE = 4
"""As before, but nothing runs as with AI_CPU (HCCL, ``comm_config.cc``)."""
MODES = {"AI_CPU": AI_CPU, "AIV": VECTOR_CORES, "AIV_ONLY": VECTOR_CORES_ALONE}
"""By the values of ``TP_VARIABLE``."""


def communicator_options(purpose: str, timeout: int, mode: int | None = None) -> Any:
    """Options of a communicator for the purpose "tp" or "bp". A variable of HCCL that the user has set wins, unless
    ``mode`` is given. HCCL gives up a silent rank after ``timeout`` seconds. ParameterError for an unknown
    ``TP_VARIABLE``.

    By CANN's documents only one communicator of a die may use the vector cores; two of them can wait for each other for
    ever. This is the tensor parallel one, which sums twice a layer, unless the variable says otherwise. All others
    follow the variable, or HCCL's default. Only if the variable is AIV they get AI_CPU instead.
    """
    given, own = os.environ.get(EXPANSION_VARIABLE), os.environ.get(TP_VARIABLE)
    if own and own not in MODES:
        raise ParameterError(TP_VARIABLE, f"unknown value {own!r}; choose one of {', '.join(MODES)}")
    if mode is None and purpose == "tp":
        mode = MODES[own] if own else None if given else VECTOR_CORES
    elif mode is None:
        mode = AI_CPU if given == "AIV" else None
    settings = {"hccl_exec_timeout": timeout}
    if mode is not None:
        settings["hccl_op_expansion_mode"] = mode
    if not os.environ.get(BUFFER_VARIABLE):
        settings["hccl_buffer_size"] = BUFFER_MB
    options = ProcessGroupHCCL.Options()
    options.hccl_config = settings
    return options
