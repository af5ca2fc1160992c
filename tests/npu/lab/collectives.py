"""Collectives of tensors on ``npu``: by gloo, on the tensors' memory.

Of the functional collectives, which compiled functions use, ``all_reduce_`` is the collective, as in torch, and
``all_reduce`` copies its argument first. HCCL runs them on a stream of its own, so what captures one must wait for its
result (``wait_tensor``) before another task uses it. Importing this module puts all of them in place for the rest of
the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.utils._pytree import tree_leaves, tree_map_only

from lopa_ascend.backend import Device
from lopa_ascend.backend.npu import hccl
from lopa_ascend.parallel import mesh
from tests.npu.lab import device, traffic, units
from tests.npu.lab.device import Place, on_npu

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

    def launched(*args: Any) -> Tensor:
        result: Tensor = device.launch(op, args, {})
        if device.recorder.taker.take is not None:
            device.recorder.unwaited.add(result.untyped_storage().data_ptr())
        return result

    _npu.impl(name, launched, "PrivateUse1")


def unit_of(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> str:
    """What runs a captured collective of the laboratory; see ``units``."""
    ranks = _resolve_process_group(args[-1]).size()
    return units.unit_of_collective(op._schema.name.removeprefix(f"{NAMESPACE}::"), args[0], ranks)


_modes: dict[str, int | None] = {}
"""By the name of a group its communicator's own expansion mode, if it has one. gloo takes no such option."""


def _noted(new_groups: Callable[..., dist.ProcessGroup]) -> Callable[..., dist.ProcessGroup]:
    def new_groups_noted(
        device: Device, purpose: str, ranks: list[list[int]], meeting: timedelta, timeout: int
    ) -> dist.ProcessGroup:
        group = new_groups(device, purpose, ranks, meeting, timeout)
        config = hccl.communicator_options(purpose, timeout).hccl_config
        _modes[group.group_name] = config.get("hccl_op_expansion_mode")
        return group

    return new_groups_noted


mesh.new_groups = _noted(mesh.new_groups)


def expansion(group_name: str) -> str:
    """Where a communicator is expanded: "AIV" or "AI_CPU". Without a mode of its own the variable says it."""
    mode = _modes.get(group_name)
    if mode is None:
        return "AIV" if os.environ.get(hccl.EXPANSION_VARIABLE) == "AIV" else "AI_CPU"
    return "AIV" if mode in (hccl.VECTOR_CORES, hccl.VECTOR_CORES_ALONE) else "AI_CPU"


def _all_reduce(x: Tensor, reduce_op: str, group_name: str) -> Tensor:
    result: Tensor = functional.all_reduce_(x.clone(memory_format=torch.contiguous_format), reduce_op, group_name)
    return result


def _wait(x: Tensor) -> Tensor:
    device.recorder.unwaited.discard(x.untyped_storage().data_ptr())
    return x


for _name, _schema in SCHEMAS.items():
    _register(_name, _schema)
_npu.impl("all_reduce", _all_reduce, "PrivateUse1")
_npu.impl("wait_tensor", _wait, "PrivateUse1")


# ---- outside of graphs ---------------------------------------------------------------------------------------------


def _on_memory(name: str) -> Callable[..., Any]:
    """A function of torch.distributed that takes tensors on ``npu`` as the host memory that they are."""
    exchange: Callable[..., Any] = getattr(dist, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = tree_map_only(Tensor, lambda x: Place.of(x).tensor() if on_npu(x) else x, (args, kwargs))
        if any(on_npu(x) for x in tree_leaves((args, kwargs))):
            traffic.launched(name)
        return exchange(*given[0], **given[1])

    return call


for _name in ("all_reduce", "all_gather", "broadcast"):
    setattr(dist, _name, _on_memory(_name))
