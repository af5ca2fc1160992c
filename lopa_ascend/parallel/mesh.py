"""The ranks of one engine: this process's rank, its groups, and how the ranks meet, start and end together.

World size = branch parallel size (bp) x tensor parallel size (tp), and rank = bp rank x tp size + tp rank, so the ranks
that split one forward pass are neighbours.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous as connect_to_store

from lopa_ascend.backend import Device, find_device
from lopa_ascend.config import EngineConfig, ParameterError
from lopa_ascend.parallel.collectives import Group, Ledger, RankError
from lopa_ascend.parallel.launch import LOOPBACK, Rendezvous
from lopa_ascend.parallel.store import START_TIMEOUT, TextStore, serve_store
from lopa_ascend.parallel.watch import ProcessWatch
from lopa_ascend.types import Traffic

logger = logging.getLogger(__name__)

MEETING_TIMEOUT = timedelta(minutes=2)
"""Limit for ranks that are all there to connect by gloo; meanwhile none notices that another has ended."""
LEAST_MEETING_TIMEOUT = timedelta(seconds=10)
"""Least time to connect, for a busy machine, however soon a rank that hangs is given up."""
RESETTABLE = ("gloo", "nccl")
ENDING_TIMEOUT = 10.0
"""Seconds that torch.distributed gets to end the groups: NCCL may wait for ranks that are gone."""
EXPLANATION_TIMEOUT = 2.0
"""Seconds that the watch gets to find the rank that made a collective fail."""


class StartError(ValueError):
    """Another rank cannot serve."""


def new_groups(
    device: Device, purpose: str, ranks: list[list[int]], meeting: timedelta, timeout: int
) -> dist.ProcessGroup:
    """Makes groups of ranks and returns the one with this rank. All ranks must call it with the same ``ranks``, a list
    for each group. ``purpose`` is "tp" or "bp"; ``meeting`` limits connecting by gloo; ``timeout``: see
    ``exec_timeout``."""
    backend = dist.get_backend()
    options = device.communicator_options(backend, purpose, timeout)
    group: dist.ProcessGroup | None
    group, _ = dist.new_subgroups_by_enumeration(
        ranks, timeout=creation_timeout(backend, meeting, timeout), pg_options=options
    )
    assert group is not None
    return group


def exec_timeout(config: EngineConfig) -> int:
    """Seconds after which HCCL gives up a silent rank: HCCL_EXEC_TIMEOUT if it is set, else when the engine does."""
    return math.ceil(float(os.environ.get("HCCL_EXEC_TIMEOUT") or config.distributed_timeout_seconds))


def creation_timeout(backend: str, meeting: timedelta, timeout: int) -> timedelta:
    """The timeout with which a group is made. gloo's and NCCL's are changed later by ``_set_timeout``. HCCL's cannot be
    changed, and torch_npu ends the process once it is over; so it is longer than ``timeout`` seconds, after which HCCL
    reports the error itself."""
    if backend == "gloo":
        return meeting
    if backend == "nccl":
        return START_TIMEOUT
    return max(START_TIMEOUT, timedelta(seconds=timeout) + MEETING_TIMEOUT)


class Mesh:
    """One rank among all ranks of an engine, and its groups. ``Mesh()`` has one rank."""

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.ledger = Ledger()
        self.tp = Group(ledger=self.ledger)
        """The ranks that split each forward pass with this one."""
        self.bp = Group(ledger=self.ledger)
        """The ranks that hold the same part of the model and compute other branches."""
        self.world = Group(ledger=self.ledger)
        """All ranks, for tensors in CPU memory, whatever the device."""
        self.start_refused = False
        """Whether some rank refused to start (``raise_together``)."""
        self.failure: str | None = None
        """Which rank has failed, and how; None until the watch notices one."""
        self.before_end: Callable[[], None] = lambda: None
        self._tp_size = 1
        self._timeout = START_TIMEOUT
        self._patience = START_TIMEOUT
        """How long this rank waits for its device, on which collectives wait for other ranks."""
        self._check_others: Callable[[], None] = lambda: None
        self._texts: TextStore | None = None
        self._watch: ProcessWatch | None = None
        self._owns_process_group = False

    # ---- meeting ---------------------------------------------------------------------------------------------------

    @classmethod
    def join(
        cls,
        config: EngineConfig,
        rendezvous: Rendezvous,
        on_failure: Callable[[str], None],
        store: Store | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> Mesh:
        """Meets the other ranks, and waits until all have come.

        Args:
            on_failure: called at most once, in a thread, with a message, when another rank has ended or hangs.
            store: the store that this process serves; None: connect to the one that ``rendezvous`` names.
            check: called on rank 0 while it waits; may raise.

        Raises:
            OSError: rank 0 cannot listen at the address of ``rendezvous``.
            ParameterError: not as many ranks were started as ``config`` asks for, this machine has fewer devices, or
                ranks on other machines could not find rank 0.
            RankError: the other ranks did not come.
            UnsupportedStackError: the software of the device is missing or too old.
        """
        rendezvous.check_world_size(config)
        rendezvous.check_host()
        mesh = cls()
        mesh.rank, mesh.size = rendezvous.rank, rendezvous.world_size
        mesh._tp_size = config.tensor_parallel_size
        mesh._timeout = timedelta(seconds=config.distributed_timeout_seconds)
        try:
            find_device(config.device).open()
            mesh._check_others = check
            torch_store = mesh._meet(rendezvous, store)
            mesh._start_watch(rendezvous, on_failure)
            mesh.all_gather_text("watched", "")  # from here on each rank hears of the end of any other
            mesh._check_others = lambda: None
            mesh._check_interface(rendezvous)
            mesh._connect(config, torch_store)
        except BaseException as error:
            mesh.close(None if mesh.start_refused else "it could not join")
            if isinstance(error, RankError) or not isinstance(error, RuntimeError):
                raise
            raise RankError(f"rank {mesh.rank}: the ranks did not meet: {mesh.failure or error}") from error
        return mesh

    def _meet(self, rendezvous: Rendezvous, store: Store | None) -> Store | None:
        """Waits for all ranks, and sets ``_texts``. Returns the store for torch.distributed; None if an earlier engine
        of these processes has initialised it."""
        if rendezvous.local:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        if store is not None and dist.is_initialized():
            raise RankError("torch.distributed is in use in this process; close() the other engine first")
        self._owns_process_group = store is not None
        is_initialized = dist.is_initialized()
        if is_initialized:
            shared = self._text_store(dist.distributed_c10d._get_default_store())
        else:
            if store is None:
                store = self._open_store(rendezvous)
            meeting = self._text_store(store).below("lopa")
            shared = meeting.below(meeting.name_start())
        engine_number = 0 if self._owns_process_group else next(_engine_numbers)
        self._texts = shared.below(f"engine/{engine_number}")
        return None if is_initialized else shared.below("ranks").store

    def _open_store(self, rendezvous: Rendezvous) -> Store:
        """The store through which the ranks find each other. Rank 0 serves it, unless torchrun does."""
        if self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return serve_store(rendezvous.host, rendezvous.port)
        store: Store
        store, _, _ = next(connect_to_store("env://", timeout=START_TIMEOUT))
        return store

    def _text_store(self, store: Store) -> TextStore:
        return TextStore(store, self.rank, self.size, self._look_for_failure)

    def _look_for_failure(self) -> str | None:
        self._check_others()
        return self.failure

    def _start_watch(self, rendezvous: Rendezvous, on_failure: Callable[[str], None]) -> None:
        """Watches the other ranks' processes from now on. Rank 0 tells the others where it listens."""
        assert self._texts is not None

        def failed(message: str) -> None:
            self.failure = message
            on_failure(message)

        timeout = self._timeout.total_seconds()
        # Ranks must end with their torchrun: a new start needs their devices and ports.
        parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        if self.rank == 0:
            self._watch = ProcessWatch.listen(self.size, timeout, failed, rendezvous.host, parent)
            self._texts.write("watch", f"{self._watch.port} {self._watch.token}")
        else:
            port, token = self._texts.read("watch").split()
            self._watch = ProcessWatch.connect(
                rendezvous.host, int(port), token, self.rank, timeout, failed, parent=parent
            )

    def _check_interface(self, rendezvous: Rendezvous) -> None:
        """Raises on all ranks if one's network interface does not exist. Ranks other than 0 raise StartError, so that
        one rank says why."""
        error: ParameterError | None = None
        try:
            rendezvous.check_interface()
        except ParameterError as wrong:
            error = wrong
        try:
            self.raise_together(error)
        except ParameterError as wrong:
            if self.rank == 0:
                raise
            raise StartError(str(wrong)) from wrong

    def _connect(self, config: EngineConfig, store: Store | None) -> None:
        """Makes the groups; first initialises torch.distributed if ``store`` is given."""
        meeting = min(MEETING_TIMEOUT, max(LEAST_MEETING_TIMEOUT, self._timeout))
        device, hccl = find_device(config.device), exec_timeout(config)
        if store is not None:
            backend = device.collectives
            timeout = creation_timeout(backend, meeting, hccl)
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout)
        grid = torch.arange(self.size).view(config.branch_parallel_size, config.tensor_parallel_size)
        self.bp = self._group(new_groups(device, "bp", grid.t().tolist(), meeting, hccl))
        self.tp = self._group(new_groups(device, "tp", grid.tolist(), meeting, hccl))
        self.world = self._group(dist.new_group(backend="gloo", timeout=meeting))
        self._set_timeout(START_TIMEOUT)

    def _group(self, process_group: dist.ProcessGroup) -> Group:
        rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
        return Group(rank, size, process_group, self.ledger, self._explain, self._check_waiting)

    # ---- starting --------------------------------------------------------------------------------------------------

    def raise_together(self, error: Exception | None) -> None:
        """Raises on every rank if any rank passes an error; None means that this rank can serve.

        Raises:
            StartError: another rank cannot serve; the message names it.
            Exception: ``error`` itself, on the rank that passed it.
        """
        messages = self.all_gather_text("refusal", "" if error is None else str(error))
        self.start_refused = self.size > 1 and any(messages)
        if error is not None:
            raise error
        for rank, message in enumerate(messages):
            if message:
                raise StartError(f"{self.describe_rank(rank)}: {message}")

    def all_gather_text(self, subject: str, text: str) -> list[str]:
        """The texts of all ranks, by rank. Every rank must call it, once for each subject."""
        if self.size == 1:
            return [text]
        assert self._texts is not None
        return self._texts.all_gather(subject, text)

    def start(self) -> None:
        """Waits until every rank has loaded. From now on a rank that hangs is given up after the configured timeout;
        HCCL has its own from the beginning (``exec_timeout``)."""
        self.world.minimum(0, "start")
        self._patience = self._timeout
        self._set_timeout(self._timeout)

    def _set_timeout(self, timeout: timedelta) -> None:
        """Limits the time of collectives of gloo and NCCL. NCCL's limit is longer, because torch ends the process when
        it is over, and this rank must first say what has failed."""
        for group in (self.tp, self.bp, self.world):
            if group.process_group is not None and (backend := dist.get_backend(group.process_group)) in RESETTABLE:
                more = MEETING_TIMEOUT if backend == "nccl" else timedelta(0)
                dist.distributed_c10d._set_pg_timeout(timeout + more, group.process_group)

    # ---- while it runs ---------------------------------------------------------------------------------------------

    def check_agreement(self, step: int, values: Mapping[str, object]) -> None:
        """Checks after a step that all ranks hold the same values, compared by ``repr``. Every rank must call it.
        RankError names the rank and the values that differ."""
        if self.size == 1:
            return
        names = ("the step", *values)
        digests = torch.tensor([step, *(zlib.crc32(repr(value).encode()) for value in values.values())])
        expected, *others = self.world.all_gather(digests, "agreement").tolist()
        for rank, found in enumerate(others, start=1):
            different = [name for name, a, b in zip(names, expected, found, strict=True) if a != b]
            if different:
                raise RankError(
                    f"{self.describe_rank(rank)} differs from rank 0 after step {step} in {', '.join(different)}"
                )

    def describe_rank(self, rank: int) -> str:
        bp, tp = divmod(rank, self._tp_size)
        return f"rank {rank} (bp {bp}, tp {tp})"

    def _explain(self) -> str | None:
        """Why a collective has failed; None if the watch does not know. Waits a while, because the watch may notice a
        failure later than the collective."""
        deadline = time.monotonic() + EXPLANATION_TIMEOUT
        while self.failure is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.failure

    def _check_waiting(self, seconds: float) -> None:
        if self.failure is not None:
            raise RankError(f"a step failed: {self.failure}")
        if seconds > self._patience.total_seconds():
            raise RankError(f"a step failed: the device has not finished it in {seconds:.0f} s; a rank does not answer")

    def traffic(self) -> tuple[Traffic, ...]:
        return self.ledger.traffic()

    # ---- ending ----------------------------------------------------------------------------------------------------

    def close(self, failure: str | None = None) -> None:
        """Leaves the other ranks. ``failure``: why this rank cannot go on, so that the others end too; None for an
        ordinary end."""
        if self._watch is not None:
            message = None if failure is None else f"{self.describe_rank(self.rank)} has left: {failure}"
            self._watch.close(message)
        if self._owns_process_group and dist.is_initialized():
            self.before_end()
            # NCCL's own way to end is an agreement with the others, which may be gone already.
            has_nccl = dist.get_backend() == "nccl"
            end = dist.distributed_c10d._abort_process_group if has_nccl else dist.destroy_process_group
            thread = threading.Thread(target=end, name="end of ranks", daemon=True)
            thread.start()
            thread.join(ENDING_TIMEOUT)
            if thread.is_alive():
                logger.warning(
                    "the groups of ranks have not ended in %g s; start another engine in another process",
                    ENDING_TIMEOUT,
                )


_engine_numbers = itertools.count()
"""Numbers successive engines in the same processes, alike on every rank."""
