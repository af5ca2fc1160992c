"""Collectives between ranks, with a count of the bytes sent for each purpose. In a group of one rank they do nothing.

``all_reduce`` and ``all_gather`` can be part of a compiled graph. There they are functional collectives and count
nothing; the launcher of the graph adds the graph's traffic to the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from lopa_ascend.types import Traffic

captured = torch.ops._c10d_functional
MAX_REASON = 500
"""Characters of the communication library's own error that messages show."""


class RankError(RuntimeError):
    """Another rank has ended, hangs, or has decided something else; the engine cannot go on."""


class Ledger:
    """Counts the collectives and bytes that this rank has sent, by purpose."""

    def __init__(self) -> None:
        self._calls: dict[str, int] = {}
        self._num_bytes: dict[str, int] = {}

    def add(self, purpose: str, num_bytes: int, calls: int = 1) -> None:
        self._calls[purpose] = self._calls.get(purpose, 0) + calls
        self._num_bytes[purpose] = self._num_bytes.get(purpose, 0) + num_bytes

    @contextmanager
    def paused(self) -> Iterator[None]:
        calls, num_bytes = dict(self._calls), dict(self._num_bytes)
        yield
        self._calls, self._num_bytes = calls, num_bytes

    def traffic(self) -> tuple[Traffic, ...]:
        return tuple(
            Traffic(purpose, calls, self._num_bytes[purpose]) for purpose, calls in sorted(self._calls.items())
        )


@dataclass(frozen=True)
class Group:
    """Ranks that make the same collectives in the same order; by default this rank alone. Every method may raise
    RankError."""

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None
    """None in a group of one."""
    ledger: Ledger = field(default_factory=Ledger)
    explain: Callable[[], str | None] = lambda: None
    """Names the rank that made a collective fail, for RankError's message; None if unknown."""
    while_waiting: Callable[[float], None] = lambda seconds: None
    """Called with the seconds so far while the host waits for its device. Raises RankError if another rank has failed
    or does not answer."""

    def all_reduce(self, x: Tensor, purpose: str) -> Tensor:
        """Sums x over all ranks: in place, except in a compiled graph, where the sum is a new tensor."""
        if self.size == 1:
            return x
        assert self.process_group is not None
        if torch.compiler.is_compiling():
            summed: Tensor = functional.all_reduce(x, "sum", self.process_group)
            return summed
        with self._counted(x, purpose):
            dist.all_reduce(x, group=self.process_group)
        return x

    def minimum(self, value: int, purpose: str) -> int:
        x = torch.tensor([value])
        if self.size > 1:
            with self._counted(x, purpose):
                dist.all_reduce(x, dist.ReduceOp.MIN, group=self.process_group)
        return int(x)

    def all_gather(self, x: Tensor, purpose: str) -> Tensor:
        """The x of all ranks by rank, [size, *x.shape]; x has the same shape on each."""
        if self.size == 1:
            return x[None]
        assert self.process_group is not None
        x = x.contiguous()
        if torch.compiler.is_compiling():
            return functional.all_gather_tensor(x[None], 0, self.process_group)
        out = x.new_empty((self.size, *x.shape))
        with self._counted(x, purpose):
            dist.all_gather(list(out.unbind()), x, group=self.process_group)
        return out

    def broadcast(self, x: Tensor, source: int, purpose: str) -> Tensor:
        """Replaces x by that of rank ``source`` of the group; shape and dtype must agree."""
        if self.size > 1:
            with self._counted(x, purpose):
                dist.broadcast(x, group=self.process_group, group_src=source)
        return x

    @contextmanager
    def _counted(self, x: Tensor, purpose: str) -> Iterator[None]:
        self.ledger.add(purpose, x.nbytes)
        try:
            yield
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:MAX_REASON]
            why = self.explain() or f"a rank does not answer ({reason})"
            raise RankError(f"the ranks' exchange of {purpose} failed: {why}") from error


class CapturedGroup(Group):
    """Makes the collectives of a captured step, as torch.compile and our graph passes leave them."""

    def all_reduce(self, x: Tensor, purpose: str) -> Tensor:
        if self.size == 1:
            return x
        summed: Tensor = captured.wait_tensor(captured.all_reduce_(x, "sum", self._name))
        return summed

    def all_gather(self, x: Tensor, purpose: str) -> Tensor:
        if self.size == 1:
            return x[None]
        gathered = captured.all_gather_into_tensor(x[None].contiguous(), self.size, self._name)
        joined: Tensor = captured.wait_tensor(gathered)
        return joined

    @property
    def _name(self) -> str:
        assert self.process_group is not None
        return str(self.process_group.group_name)


ALONE = Group()
