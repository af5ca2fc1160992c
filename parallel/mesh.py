"""The ranks of one engine: who they are, how they find each other, and how they are told apart.

Rank = bp rank x tp size + tp rank, so the ranks that split one forward pass are neighbours. Where they meet is said as
torchrun says it, by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import itertools
import os
import secrets
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous

from lopa_ascend.backend import collective_backend, open_device
from lopa_ascend.config import EngineConfig
from lopa_ascend.parallel.collectives import Group, Ledger, RankError
from lopa_ascend.parallel.launch import LOOPBACK, Meeting
from lopa_ascend.parallel.watch import Watch
from lopa_ascend.types import Traffic

START_TIMEOUT = timedelta(minutes=30)
"""Until all ranks have met, and again until all have loaded: one may read its weights from a slower disk."""
POLL = 0.02
"""Seconds between two looks into the store."""
VERDICT = 2.0
"""Seconds in which the watch says which rank is to blame for a collective that failed."""


class StartError(ValueError):
    """Another rank cannot serve."""


@dataclass
class _Failure:
    """What the watch found."""

    message: str | None = None

    def explain(self) -> str:
        deadline = time.monotonic() + VERDICT
        while self.message is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.message or "a rank does not answer"


class Mesh:
    """This rank's place among all, and its groups.

    ``tp``: the ranks that split each forward pass with it. ``bp``: those that have the same part of the model and take
    other branches. ``world``: all, for messages of the host, in the CPU's memory on every device.
    """

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.refused = False
        self.ledger = Ledger()
        self.tp = self.bp = self.world = Group(ledger=self.ledger)
        self._failure = _Failure()
        self._watch: Watch | None = None
        self._store: Store | None = None
        self._timeout = START_TIMEOUT
        self._owns_processes = False

    @classmethod
    def join(
        cls,
        config: EngineConfig,
        meeting: Meeting,
        on_failure: Callable[[str], None],
        store: Store | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> Mesh:
        """Waits for the other ranks. ``on_failure`` is called in a thread, at most once, when another rank has ended or
        hangs. ``store`` is where the ranks meet, if this process has made it for them; ``check`` is called while rank
        0 waits and may raise.

        Raises:
            ParameterError: the number of ranks that were started is not what ``config`` asks for, or this machine has
                fewer devices.
            RankError: the others did not come.
            UnsupportedStackError: the software of the device is missing or too old.
        """
        meeting.check(config)
        mesh = cls()
        mesh.rank, mesh.size = meeting.rank, meeting.world_size
        mesh._timeout = timedelta(seconds=config.distributed_timeout_seconds)
        try:
            mesh._connect(config, meeting, on_failure, store, check)
        except BaseException as error:
            mesh.close("it could not join")
            if isinstance(error, RankError) or not isinstance(error, RuntimeError):
                raise
            raise RankError(f"rank {mesh.rank}: the ranks did not meet: {error}") from error
        return mesh

    def _connect(
        self,
        config: EngineConfig,
        meeting: Meeting,
        on_failure: Callable[[str], None],
        store: Store | None,
        check: Callable[[], None],
    ) -> None:
        open_device(config.device)
        if meeting.local:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        if store is not None and dist.is_initialized():
            raise RankError("torch.distributed is in use in this process; close() the other engine first")
        self._owns_processes = store is not None
        if not dist.is_initialized():
            if store is None:
                store, _, _ = next(rendezvous("env://", timeout=START_TIMEOUT))
            self._store = PrefixStore("lopa", store)
            self._store = PrefixStore(self._meet(check), self._store)
            dist.init_process_group(
                collective_backend(config.device),
                store=PrefixStore("ranks", self._store),
                rank=self.rank,
                world_size=self.size,
                timeout=START_TIMEOUT,
            )
        else:
            self._store = dist.distributed_c10d._get_default_store()
        number = 0 if self._owns_processes else next(_engines)
        self._store = PrefixStore(f"engine/{number}", self._store)
        self._watch = self._start_watch(self._store, meeting, on_failure)
        sizes = config.branch_parallel_size, config.tensor_parallel_size
        grid = init_device_mesh(config.device, sizes, mesh_dim_names=("bp", "tp"))
        self.bp, self.tp = (self._group(grid.get_group(name)) for name in ("bp", "tp"))
        self.world = self._group(dist.new_group(backend="gloo", timeout=START_TIMEOUT))

    def _meet(self, check: Callable[[], None]) -> str:
        """A name for this start that all its ranks know. torchrun's store outlives the ranks that it starts again, and
        so does what they wrote: rank 0 names itself, the others tell that name their own, and a rank goes on when
        rank 0 has read its name, not that of the one before it."""
        assert self._store is not None
        own = secrets.token_hex(8)
        if self.rank == 0:
            self._store.set("leader", own)
            self._store.set(f"{own}/all", " ".join(self._read(f"{own}/{rank}", check) for rank in range(1, self.size)))
            return own
        leader = ""
        for _ in self._waiting(f"rank 0 has not called for {START_TIMEOUT}"):
            if leader and self._store.check([f"{leader}/all"]) and own in self._read(f"{leader}/all").split():
                break
            if (current := self._read("leader")) != leader:
                leader = current
                self._store.set(f"{leader}/{self.rank}", own)
        return leader

    def _read(self, key: str, check: Callable[[], None] = lambda: None) -> str:
        """What a rank has written to the store, once it has."""
        assert self._store is not None
        for _ in self._waiting(f"nobody has said {key} for {START_TIMEOUT}"):
            if self._store.check([key]):
                break
            check()
        text: str = self._store.get(key).decode()
        return text

    def _waiting(self, complaint: str) -> Iterator[None]:
        """Now and then, until the ranks have failed or for too long; raises RankError then."""
        deadline = time.monotonic() + START_TIMEOUT.total_seconds()
        while time.monotonic() < deadline:
            yield
            if self.failure is not None:
                raise RankError(self.failure)
            time.sleep(POLL)
        raise RankError(complaint)

    def _group(self, process_group: dist.ProcessGroup) -> Group:
        rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
        return Group(rank, size, process_group, self.ledger, self._failure.explain)

    def _start_watch(self, store: Store, meeting: Meeting, on_failure: Callable[[str], None]) -> Watch:
        def failed(message: str) -> None:
            self._failure.message = message
            on_failure(message)

        timeout = self._timeout.total_seconds()
        if self.rank == 0:
            watch = Watch.lead(self.size, timeout, failed, meeting.host if meeting.local else "")
            store.set("watch", f"{watch.port} {watch.token}")
            return watch
        port, token = self._read("watch").split()
        return Watch.follow(meeting.host, int(port), token, self.rank, timeout, failed)

    # ---- the start -------------------------------------------------------------------------------------------------

    def refuse_together(self, error: Exception | None) -> None:
        """Every rank says what keeps it from serving, if anything does, and none goes on if one cannot; ``refused`` is
        set then.

        Raises:
            StartError: another rank said so, which the message names. Its own ``error`` each rank raises itself.
        """
        said = self.tell("refusal", "" if error is None else str(error))
        self.refused = self.size > 1 and any(said)
        for rank, message in enumerate(said):
            if error is None and message:
                raise StartError(f"{self.name(rank)}: {message}")
        if error is not None:
            raise error

    def tell(self, subject: str, text: str) -> list[str]:
        """What every rank says on a subject, by rank; each says one thing on it."""
        if self.size == 1:
            return [text]
        assert self._store is not None
        self._store.set(f"{subject}/{self.rank}", text)
        return [self._read(f"{subject}/{rank}") for rank in range(self.size)]

    def start(self) -> None:
        """Waits until every rank has loaded; from now on one that hangs is given up after the configured time."""
        self.world.minimum(0, "start")
        for group in (self.tp, self.bp, self.world):
            if group.process_group is not None:
                dist.distributed_c10d._set_pg_timeout(self._timeout, group.process_group)

    def agree(self, step: int, values: Mapping[str, object]) -> None:
        """Compares what the ranks hold for equal; ``values`` by a name for people, compared by their ``repr``.

        Raises:
            RankError: this rank or another differs from rank 0; the message says which, and in what.
        """
        if self.size == 1:
            return
        digests = torch.tensor([step, *(zlib.crc32(repr(value).encode()) for value in values.values())])
        gathered = self.world.all_gather(digests, "agreement")
        for rank, theirs in enumerate(gathered[1:].tolist(), start=1):
            own = gathered[0].tolist()
            different = [name for name, a, b in zip(("the step", *values), own, theirs, strict=True) if a != b]
            if different:
                raise RankError(f"{self.name(rank)} differs from rank 0 after step {step} in {', '.join(different)}")

    def name(self, rank: int) -> str:
        """A rank for people."""
        return f"rank {rank} (bp {rank // self.tp.size}, tp {rank % self.tp.size})"

    # ---- the end ---------------------------------------------------------------------------------------------------

    @property
    def failure(self) -> str | None:
        """Why the ranks cannot go on, once the watch has found out."""
        return self._failure.message

    def traffic(self) -> tuple[Traffic, ...]:
        return self.ledger.traffic()

    def close(self, failure: str | None = None) -> None:
        """Leaves the other ranks: with a goodbye, after which they do not miss this one, or because of a ``failure``
        here, for which they end."""
        if self._watch is not None:
            self._watch.close(None if failure is None else f"{self.name(self.rank)} has left: {failure}")
        if self._owns_processes and dist.is_initialized():
            dist.destroy_process_group()


_engines = itertools.count()
"""Numbers engines that follow each other in the same processes, alike on every rank."""
