"""The collectives that ranks use, counted by purpose.

A group of one rank is no group: nothing is sent and nothing is counted, so whoever takes a group needs no other case.

``all_reduce`` and ``all_gather`` can be compiled. They become functional collectives of the graph then, which nobody
counts: whoever launches the graph tells the ledger what is in it.
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


class RankError(RuntimeError):
    """Another rank has ended, hangs, or has decided something else; the engine cannot go on."""


@dataclass
class Ledger:
    """Calls and bytes by purpose."""

    _counts: dict[str, list[int]] = field(default_factory=dict)

    def add(self, purpose: str, num_bytes: int, calls: int = 1) -> None:
        """``num_bytes`` of all these calls."""
        entry = self._counts.setdefault(purpose, [0, 0])
        entry[0] += calls
        entry[1] += num_bytes

    def traffic(self) -> tuple[Traffic, ...]:
        return tuple(Traffic(purpose, *entry) for purpose, entry in sorted(self._counts.items()))


@dataclass(frozen=True)
class Group:
    """Some of the ranks, of which this is number ``rank`` of ``size``. Every one of them must make the same calls in
    the same order. ``process_group`` is None in a group of one.

    ``explain`` says why another rank does not answer, for the RankError that any method may raise.
    """

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None
    ledger: Ledger = field(default_factory=Ledger)
    explain: Callable[[], str] = lambda: "unknown"

    def all_reduce(self, x: Tensor, purpose: str) -> Tensor:
        """The sum of all ranks' x, in x itself; in a compiled function in memory of its own."""
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
        """The smallest of all ranks' values."""
        x = torch.tensor([value])
        if self.size > 1:
            with self._counted(x, purpose):
                dist.all_reduce(x, dist.ReduceOp.MIN, group=self.process_group)
        return int(x)

    def all_gather(self, x: Tensor, purpose: str) -> Tensor:
        """[size, *x.shape]: x of all ranks in their order; it has the same shape on each."""
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
        """x of rank ``source`` of this group, in x itself."""
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
            raise RankError(f"the ranks' exchange of {purpose} failed: {self.explain()}") from error


ALONE = Group()
"""The group of a process that is the only rank."""
