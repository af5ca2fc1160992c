"""Short texts between ranks in a store of torch.distributed, mostly while they start."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from lopa_ascend.parallel.collectives import RankError
from lopa_ascend.parallel.launch import listen

START_MINUTES = 30
START_TIMEOUT = timedelta(minutes=START_MINUTES)
"""Time for all ranks to meet, and again for all to load: one may read its weights from a slower disk."""
POLL_INTERVAL = 0.02
"""Seconds."""


def serve_store(host: str, port: int) -> TCPStore:
    """Serves a store at one address; port 0 means any free port. OSError if it cannot listen there.

    Its protocol authenticates nobody, and by itself it would listen on every interface of the machine.
    """
    listener = listen(host, port)
    own_port: int = listener.getsockname()[1]
    own_socket = listener.detach()  # the store closes it
    return TCPStore(host, own_port, None, True, START_TIMEOUT, wait_for_workers=False, master_listen_fd=own_socket)


class TextStore:
    """One rank's access to the texts. ``failure`` says why the ranks cannot go on, or None; it is asked while this rank
    waits for a text, and may raise."""

    def __init__(self, store: Store, rank: int, size: int, failure: Callable[[], str | None]):
        self.store = store
        self._rank, self._size = rank, size
        self._failure = failure

    def below(self, prefix: str) -> TextStore:
        return TextStore(PrefixStore(prefix, self.store), self._rank, self._size, self._failure)

    def write(self, key: str, text: str) -> None:
        self.store.set(key, text)

    def read(self, key: str, awaited: str = "rank 0") -> str:
        """Waits for a text that ``awaited`` writes. RankError if the ranks have failed, or the text did not come in
        time."""
        what_to_do = "see the logs of the other ranks, and whether all of them were started"
        for _ in self._poll(f"waited {START_MINUTES} minutes for {awaited}; {what_to_do}"):
            if self._has(key):
                break
        text: str = self.store.get(key).decode()
        return text

    def all_gather(self, subject: str, text: str) -> list[str]:
        """The texts of all ranks, by rank. Every rank must call it, once for each subject. Raises like ``read``."""
        self.write(f"{subject}/{self._rank}", text)
        return [self.read(f"{subject}/{rank}", f"rank {rank} to report {subject!r}") for rank in range(self._size)]

    def name_start(self) -> str:
        """A name for this start of the ranks: equal on all of them, and different at every start.

        torchrun's store outlives the ranks that it restarts, and keeps texts of ranks that have ended. So each rank
        draws a random token, and the token of rank 0 names the start. Rank 0 publishes its token, collects the others'
        and publishes their list. Another rank goes on when its own token is in that list: then the name is of this
        start. Raises like ``read``.
        """
        token = secrets.token_hex(8)
        if self._rank == 0:
            self.write("leader", token)
            tokens = [self.read(f"{token}/{rank}", f"rank {rank}") for rank in range(1, self._size)]
            self.write(f"{token}/all", " ".join(tokens))
            return token
        leader = ""
        what_to_do = "see whether it was started, with the same MASTER_ADDR and MASTER_PORT"
        for _ in self._poll(f"rank 0 has not appeared for {START_MINUTES} minutes; {what_to_do}"):
            if leader and self._has(f"{leader}/all") and token in self.read(f"{leader}/all").split():
                break
            current = self.read("leader") if self._has("leader") else leader
            if current != leader:
                leader = current
                self.write(f"{leader}/{self._rank}", token)
        return leader

    def _has(self, key: str) -> bool:
        found: bool = self.store.check([key])
        return found

    def _poll(self, complaint: str) -> Iterator[None]:
        """Yields every ``POLL_INTERVAL`` seconds. RankError if the ranks have failed or, with ``complaint``,
        ``START_TIMEOUT`` is over."""
        deadline = time.monotonic() + START_TIMEOUT.total_seconds()
        while time.monotonic() < deadline:
            yield
            failure = self._failure()
            if failure is not None:
                raise RankError(failure)
            time.sleep(POLL_INTERVAL)
        raise RankError(complaint)
