"""The functional collectives, which compiled functions use, for tensors on ``npu``: by gloo, on the tensors' memory.

Importing this module registers them for the rest of the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.npu.lab import device

functional = torch.ops._c10d_functional
SCHEMAS = {
    "all_reduce": "(Tensor x, str reduce_op, str group_name) -> Tensor",
    "all_gather_into_tensor": "(Tensor x, int group_size, str group_name) -> Tensor",
}
"""Schemas of the functional collectives by name. The laboratory has ops of the same names that have waited for the
result when they return."""
_own = torch.library.Library("lab", "DEF")
_npu = torch.library.Library("_c10d_functional", "IMPL")


def _register(name: str, schema: str) -> None:
    exchange: Callable[..., Tensor] = getattr(functional, name)
    _own.define(name + schema)

    def waited(*args: Any) -> Tensor:
        result: Tensor = functional.wait_tensor(exchange(*args))
        return result

    _own.impl(name, waited, "CPU")
    _own.impl(name, exchange, "Meta")
    op = getattr(torch.ops.lab, name).default
    _npu.impl(name, lambda *args: device.launch(op, args, {}), "PrivateUse1")


for _name, _schema in SCHEMAS.items():
    _register(_name, _schema)
