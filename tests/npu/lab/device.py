"""A simulated NPU: tensors on ``npu`` that compute.

The real torch_npu allocates their memory through the stand-in for the runtime, so it is memory of the host. Importing
this module replaces every kernel for ``npu`` by the CPU kernel of the same op, which works on the same bytes, for the
rest of the process.

During a capture nothing is computed; ``capture`` records the launches instead.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch_npu
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.npu.lab import attention, kernels, traffic  # noqa: F401
from tests.npu.lab.constraints import require

OWN = (
    *("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_quantized", "set_", "resize_"),
    *("resize_as_", "_to_copy", "to", "record_stream", "is_pinned", "_pin_memory", "_reshape_alias", "is_set_to"),
)
"""Ops that stay torch_npu's own: they allocate, or change the shape and strides of a tensor."""
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.mm.dtype)
"""Ops that are computed in float32 and rounded once, as a device does. The CPU's own kernels of narrower types do the
same, but on processors without such units they take fifty times as long."""
HOST_SIDE = "_get_max_workspace"
"""Ending of the names of ops that the host computes; they launch nothing."""
FRACTAL_NZ = 29
"""The format in which a device keeps a matrix in tiles. Here such a tensor has the same bytes as another one, in memory
of the size that the real torch_npu gives it."""
TAKES_TILES = ("npu::npu_quant_matmul", "npu::npu_grouped_matmul")
"""Ops that take a tensor in this format."""
DATA_DEPENDENT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclass(frozen=True)
class Place:
    """The memory of a tensor, which it does not keep alive: as on a device, a graph that is replayed finds there
    whatever the memory holds by then."""

    address: int
    """Address of the first element."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements."""
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        return cls(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def tensor(self) -> Tensor:
        """A CPU tensor over these bytes."""
        if 0 in self.size:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype)
        elements = 1 + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        memory = (ctypes.c_char * (elements * self.dtype.itemsize)).from_address(self.address)
        return torch.frombuffer(memory, dtype=self.dtype).as_strided(self.size, self.stride)


def on_npu(x: object) -> bool:
    return isinstance(x, Tensor) and x.device.type == "npu"


def cpu_result(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs the CPU kernel of an op on tensors of the host; every result of an op comes from here."""
    if op not in PRODUCTS:
        return op(*args, **kwargs)
    if op is torch.ops.aten.mm.dtype:
        return (args[0].float() @ args[1].float()).to(args[2])
    return op(*tree_map_only(Tensor, Tensor.float, args), **kwargs).to(args[0].dtype)


def compute(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs the CPU kernel of an op on the memory of tensors on ``npu``; its results are tensors on ``npu``."""
    given: list[tuple[Tensor, Tensor]] = []

    def down(x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("cpu") if x.type == "npu" else x
        if on_npu(x):
            given.append((Place.of(x).tensor(), x))
            return given[-1][0]
        return x

    def up(result: Tensor) -> Tensor:
        for host, tensor in given:
            if result is host:
                return tensor
            if result.untyped_storage().data_ptr() == host.untyped_storage().data_ptr() != 0:
                offset = tensor.storage_offset() + result.storage_offset()
                return tensor.as_strided(result.shape, result.stride(), offset)
        out = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="npu")
        Place.of(out).tensor().copy_(result)
        return out

    kinds = (Tensor, torch.device)
    result = cpu_result(op, tree_map_only(kinds, down, args), tree_map_only(kinds, down, kwargs))
    return tree_map_only(Tensor, up, result)


def allocate(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Memory for the results of an op, or the arguments that it writes its results to."""
    if "out" in kwargs:
        return kwargs["out"] if op._schema.returns else None
    given: list[tuple[Tensor, Tensor]] = []

    def to_meta(x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("meta")
        given.append((torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), x))
        return given[-1][0]

    def real(x: Tensor) -> Tensor:
        for meta, tensor in given:
            if meta is x:
                return tensor
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="npu")

    kinds = (Tensor, torch.device)
    return tree_map_only(
        Tensor, real, op(*tree_map_only(kinds, to_meta, args), **tree_map_only(kinds, to_meta, kwargs))
    )


class _Taker(threading.local):
    """Of one thread: another one may change the tasks of a graph meanwhile."""

    take: Callable[[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]], Any] | None = None


@dataclass
class Recorder:
    """How ``capture`` takes part in launches."""

    taker: _Taker = field(default_factory=_Taker)
    """While a graph is captured or changed, takes launches (op, args, kwargs) instead of the device."""
    unwaited: set[int] = field(default_factory=set)
    """Addresses of results of captured collectives that the captured stream has not waited for."""
    before: list[Callable[[], None]] = field(default_factory=list)
    """Called before a launch runs; may refuse it because a graph waits for an update."""
    waited: list[Callable[[], None]] = field(default_factory=list)
    """Called when the host has waited for the device, so that all launches are over."""
    computes: bool = True
    """Without this, launches compute nothing: their results are memory of the right shapes, with whatever it holds."""


recorder = Recorder()


def reads_data(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether the host needs values of tensors on the device to go on after this op."""
    if op._schema.name == "aten::index":
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return any(tag in op.tags for tag in DATA_DEPENDENT)


def copy_with_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, bool]:
    """The name of a copy from or to the host, and whether the host waits for it.

    It does not wait for a non-blocking copy from or to pinned memory, and for a single value that is sent with the
    launch.
    """
    target, source = args[:2]
    to_host = not on_npu(target)
    host = target if to_host else source
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    goes_on = (non_blocking and host.is_pinned()) or (not to_host and host.dim() == 0)
    return f"copy to {'host' if to_host else 'device'}", not goes_on


def refuse_host_tensors(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses tensors of the host as arguments of a kernel. Single values are sent with the launch."""
    if any(isinstance(x, Tensor) and x.device.type == "cpu" and x.dim() for x in tree_leaves((args, kwargs))):
        raise RuntimeError(f"{op._schema.name}: one tensor is on the device and another one on the host")


def refuse_tiles(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses tensors in the format FRACTAL_NZ as arguments of a kernel that would read them as if they were in ND."""
    if op._schema.name not in TAKES_TILES and any(on_npu(x) and is_tiled(x) for x in tree_leaves((args, kwargs))):
        raise RuntimeError(f"{op._schema.name}: a tensor is in the format FRACTAL_NZ")


def refuse_unwaited(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses a collective's result before a captured stream has waited for it."""
    used = (x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if on_npu(x))
    if recorder.unwaited and any(address in recorder.unwaited for address in used):
        raise RuntimeError(f"{op._schema.name}: uses what a collective writes without having waited for it")


def refuse_costly(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
    """Refuses what costs an NPU more than the engine can pay: aclnnInplaceIndexCopy transposes the whole tensor along
    any dimension but the first, and scatter_reduce runs on the host but for sums."""
    name = op._schema.name.removesuffix("_")
    if name == "aten::index_copy":
        require(args[1] == 0, "index_copy: transposes the whole tensor unless dim is 0")
    if name == "aten::scatter_reduce":
        require(args[4] == "sum", f"scatter_reduce: {args[4]} runs on the host")


def is_tiled(x: Tensor) -> bool:
    """Whether a tensor on ``npu`` is in the format FRACTAL_NZ."""
    return int(torch_npu.get_npu_format(x)) == FRACTAL_NZ


def format_cast(input: Tensor, acl_format: int, **options: Any) -> Tensor:
    """``npu_format_cast`` of an int8 matrix, or of several, to the format FRACTAL_NZ."""
    require(acl_format == FRACTAL_NZ and not any(options.values()), "npu_format_cast: the laboratory knows FRACTAL_NZ")
    require(input.dtype == torch.int8 and input.dim() in (2, 3), "npu_format_cast: the laboratory knows int8 matrices")
    out: Tensor = torch.ops.npu.empty_with_format(
        list(input.shape), dtype=input.dtype, device="npu", acl_format=acl_format
    )
    traffic.launched("npu::npu_format_cast")
    Place.of(out).tensor().copy_(Place.of(input).tensor())
    return out


def launch(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an op on the simulated device, or hands it to the recorder, and notes it in ``traffic``."""
    name = op._schema.name
    with_host = name == "aten::copy_" and not all(map(on_npu, args[:2]))
    if with_host:
        name, waits = copy_with_host(args, kwargs)
    else:
        refuse_host_tensors(op, args, kwargs)
        refuse_tiles(op, args, kwargs)
        refuse_costly(op, args)
        waits = reads_data(op, args)
    if recorder.taker.take is not None:
        if with_host or waits:
            raise RuntimeError(f"{name}: the host takes part in this, so no graph can hold it")
        refuse_unwaited(op, args, kwargs)
        return recorder.taker.take(op, args, kwargs)
    for check in recorder.before:
        check()
    if waits:
        traffic.stalled(name)
        for note in recorder.waited:
            note()
    traffic.launched(name)
    computes = recorder.computes or with_host or name.endswith(HOST_SIDE)
    return compute(op, args, kwargs) if computes else allocate(op, args, kwargs)


@contextmanager
def nothing_computed() -> Iterator[None]:
    """Launches compute nothing in this context, so that models too large for the host can be compiled and captured."""
    before, recorder.computes = recorder.computes, False
    try:
        yield
    finally:
        recorder.computes = before


def _kernel_of(op: torch._ops.OpOverload) -> Callable[..., Any]:
    return lambda *args, **kwargs: launch(op, args, kwargs)


def _replace_kernels() -> list[torch.library.Library]:
    libraries = {space: torch.library.Library(space, "IMPL") for space in ("aten", "npu")}
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if space not in libraries or base in OWN:
            continue
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "PrivateUse1"):
            continue
        # Of the ops of torch_npu only those that the laboratory has kernels for; the others fail in the stand-ins.
        if space == "npu" and not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
            continue
        packet = getattr(getattr(torch.ops, space), base, None)
        if packet is None:
            continue
        op = getattr(packet, overload or "default")
        if not op.is_view:
            libraries[space].impl(rest, _kernel_of(op), "PrivateUse1", allow_override=True)
    libraries["npu"].impl("npu_format_cast", format_cast, "PrivateUse1", allow_override=True)
    return list(libraries.values())


_libraries = _replace_kernels()
