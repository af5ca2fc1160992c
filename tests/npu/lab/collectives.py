"""The collectives of a compiled function for tensors on ``npu``: by gloo, on the memory that they have here.

Importing this module registers them, for good.
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
"""By the functional collective's name; the laboratory's own ops of these names are over when they return."""
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
