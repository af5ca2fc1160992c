"""The NPU backend: the only place that imports torch_npu and torchair."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lopa_ascend.backend.npu.versions import check_installed

if TYPE_CHECKING:
    from lopa_ascend.backend.npu.ops import NpuOps


def load_npu_ops(graph_mode: str, *, attention_layout: str = "TND", debug: bool = False) -> NpuOps:
    """The ops, after a check that the installed versions can run them in this mode; the options are those of NpuOps.

    Raises:
        UnsupportedStackError: they cannot.
        ValueError: an option is unknown.
    """
    check_installed(graph_mode)
    from lopa_ascend.backend.npu.ops import NpuOps

    return NpuOps(attention_layout=attention_layout, debug=debug)
