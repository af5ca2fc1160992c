"""The functional collectives, which compiled functions use, for tensors on ``npu``: by gloo, on the tensors' memory.

As in torch, ``all_reduce_`` is the collective, and ``all_reduce`` copies its argument first. Importing this module
registers them for the rest of the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.npu.lab import device

functional = torch.ops._c10d_functional
SCHEMAS = {
    "all_reduce_": "(Tensor(a!) x, str reduce_op, str group_name) -> Tensor(a!)",
    "all_gather_into_tensor": "(Tensor x, int group_size, str group_name) -> Tensor",
}
"""Schemas of the functional collectives by name. The laboratory has ops of the same names that have waited for the
result when they return."""
NAMESPACE = "lab"
_own = torch.library.Library(NAMESPACE, "DEF")
_npu = torch.library.Library("_c10d_functional", "IMPL")


def _register(name: str, schema: str) -> None:
    exchange: Callable[..., Tensor] = getattr(functional, name)
    _own.define(name + schema)

    def waited(*args: Any) -> Tensor:
        result: Tensor = functional.wait_tensor(exchange(*args))
        return result

    def shape(x: Tensor, *args: Any) -> Tensor:
        return x if name.endswith("_") else exchange(x, *args)

    _own.impl(name, waited, "CPU")
    _own.impl(name, shape, "Meta")
    op = getattr(torch.ops.lab, name).default
    _npu.impl(name, lambda *args: device.launch(op, args, {}), "PrivateUse1")


def _all_reduce(x: Tensor, reduce_op: str, group_name: str) -> Tensor:
    result: Tensor = functional.all_reduce_(x.clone(memory_format=torch.contiguous_format), reduce_op, group_name)
    return result


for _name, _schema in SCHEMAS.items():
    _register(_name, _schema)
_npu.impl("all_reduce", _all_reduce, "PrivateUse1")
