"""Captures of steps without a GPU: what a stream capture would refuse is refused, and what it would keep is kept.

A capture notes torch's ops and Triton's launches with the memory that they were called with. A replay calls them again
in the same order, and puts what an op has made where it lay during the capture. So it computes what a replay on a GPU
computes: from what then lies in the memory that the captured ops read.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

READ_BY_THE_HOST = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero", "item", "bincount",
    "repeat_interleave", "lift_fresh", "lift", "tolist", "numpy", "__bool__", "__int__", "__float__", "__array__",
    "cpu", "tensor", "from_numpy", "pin_memory",
}  # fmt: skip
"""Ops and functions that wait for the device, or bring data of the host: a capture may do neither."""


class CaptureRefused(RuntimeError):
    """What a stream capture would refuse, or a replay would read from memory that is no longer there."""


class Recorder:
    """A ``Capture`` in the memory of the CPU.

    Attributes:
        replays: how many captures were replayed.
    """

    def __init__(self) -> None:
        self.replays = 0

    def warm_up(self, launch: Callable[[], Tensor]) -> None:
        launch()

    def capture(self, launch: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        tape = _Tape()
        original = GridExecutor.__call__
        GridExecutor.__call__ = tape.noting(original)
        try:
            with _HostReads(), tape:
                output = launch()
        finally:
            GridExecutor.__call__ = original
        tape.end()

        def replay() -> None:
            self.replays += 1
            tape.replay()

        return replay, output

    def wait(self, while_waiting: Callable[[float], None] = lambda seconds: None) -> None:
        pass

    def reserved(self) -> int:
        return 0

    def close(self) -> None:
        pass


class _HostReads(TorchFunctionMode):
    """Refuses the functions that torch does not dispatch as ops."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READ_BY_THE_HOST:
            raise CaptureRefused(f"{func.__name__}: waits for the device, or takes data of the host")
        return func(*args, **(kwargs or {}))


class _Outside:
    """A tensor from before the capture, of which a graph knows the address alone."""

    def __init__(self, x: Tensor, who: str) -> None:
        self._storage, self._who = StorageWeakRef(x.untyped_storage()), who
        self._view = x.storage_offset(), x.size(), x.stride()
        self._dtype = x.dtype

    def tensor(self) -> Tensor:
        if self._storage.expired():
            raise CaptureRefused(f"{self._who}: its memory was freed after the capture")
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._view)


class _Tape(TorchDispatchMode):
    """The ops and launches of one capture."""

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        tensors = (x for x in gc.get_objects() if issubclass(type(x), Tensor) and not x.is_mkldnn)
        # They are held until the capture ends, so that nothing new gets their addresses.
        self._before = {_address(x): x for x in tensors}
        self._pool: dict[int, Tensor] = {}
        self._calls: list[Callable[[], None]] = []

    def end(self) -> None:
        self._before = {}

    def replay(self) -> None:
        for call in self._calls:
            call()

    def noting(self, launch: Callable[..., None]) -> Callable[..., None]:
        """A launch that is noted, and made."""

        def note(kernel: GridExecutor, *args: Any, **kwargs: Any) -> None:
            with _disable_current_modes():
                held = self._held((args, kwargs), kernel.fn.__name__)
                launch(kernel, *args, **kwargs)
            self._calls.append(lambda: _call(lambda *a, **k: launch(kernel, *a, **k), held))

        return note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        takes_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in READ_BY_THE_HOST or takes_mask:
            raise CaptureRefused(f"{func}: waits for the device, or takes data of the host")
        held = self._held((args, kwargs), str(func))
        given = {_address(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        results = func(*args, **kwargs)
        made: dict[int, Tensor] = {}  # by its number among the results, what did not come in
        for number, x in enumerate(pytree.tree_leaves(results)):
            if isinstance(x, Tensor) and x.numel() and _address(x) not in given:
                made[number] = self._pool[_address(x)] = x

        def call() -> None:
            again = pytree.tree_leaves(_call(func, held))
            for number, target in made.items():
                target.copy_(again[number])

        self._calls.append(call)
        return results

    def _held(self, arguments: Any, who: str) -> Any:
        """Arguments of which tensors from outside of the pool are not kept alive.

        Raises:
            CaptureRefused: one was made while the capture ran, but not by it.
        """

        def held(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.numel() or _address(x) in self._pool:
                return x
            if _address(x) not in self._before:
                raise CaptureRefused(f"{who}: takes a tensor {list(x.shape)} that was allocated outside of the pool")
            return _Outside(x, who)

        return pytree.tree_map(held, arguments)


def _call(function: Callable[..., Any], held: Any) -> Any:
    args, kwargs = pytree.tree_map(lambda x: x.tensor() if isinstance(x, _Outside) else x, held)
    return function(*args, **kwargs)


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
