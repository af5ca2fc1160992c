"""Which replica gets a choice: the one with the fewest tokens to compute. Ray Serve's request routers do the rest."""

from __future__ import annotations

from collections import OrderedDict, defaultdict

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from lopa_ascend.serve.replicas import reports

MAX_HOMES = 8192
"""Prompts whose replica a router remembers."""


class FewestTokens(RequestRouter):
    """Sends a choice to the replica that would have the fewest tokens to compute with it.

    A replica's load is what its engine reports, and what this router has sent there since. Tokens that a prompt shares
    with an earlier one do not count on the replica that had it last: its prefix cache has them.
    """

    def initialize_state(self, prefixes: bool = True) -> None:
        """``prefixes``: prompts that share tokens go to the same replica."""
        self._prefixes = prefixes
        self._homes: OrderedDict[int, ReplicaID] = OrderedDict()
        self._sent: dict[str, tuple[ReplicaID, int]] = {}
        """Replica and tokens, by request."""
        self._own: defaultdict[ReplicaID, int] = defaultdict(int)
        """Unfinished tokens that this router has sent to a replica."""
        self._others: dict[ReplicaID, int] = {}
        """Tokens from other routers."""
        self._reports: dict[ReplicaID, int] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        board = {}
        for replica in replicas:
            stats = replica.routing_stats
            board[replica.replica_id.unique_id] = stats
            if stats and self._reports.get(replica.replica_id) != stats["report"]:
                self._reports[replica.replica_id] = stats["report"]
                self._others[replica.replica_id] = max(0, stats["tokens"] - self._own[replica.replica_id])
        reports.reported[self._deployment_id.name] = board
        current = {replica.replica_id for replica in replicas}
        for numbers in (self._own, self._others, self._reports):
            for gone in numbers.keys() - current:
                del numbers[gone]

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        asked = {} if pending_request is None else pending_request.kwargs
        prompt, saved = asked.get("prompt", (0, 0))
        home = self._homes.get(prompt)

        def load(replica: RunningReplica) -> int:
            name = replica.replica_id
            return self._own[name] + self._others.get(name, 0) - (saved if name == home else 0)

        replicas = sorted(candidate_replicas, key=load)
        if pending_request is not None and replicas:
            self._charge(pending_request, replicas[0].replica_id)
        return [[replica] for replica in replicas]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        self._charge(pending_request, replica_id)
        if self._prefixes and "prompt" in pending_request.kwargs:
            prompt, _ = pending_request.kwargs["prompt"]
            self._homes[prompt] = replica_id
            self._homes.move_to_end(prompt)
            if len(self._homes) > MAX_HOMES:
                self._homes.popitem(last=False)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._settle(internal_request_id)

    def _charge(self, request: PendingRequest, replica_id: ReplicaID) -> None:
        """Counts as soon as a replica is chosen: the next choice may come before the replica has the request."""
        name, tokens = request.metadata.internal_request_id, request.kwargs.get("tokens", 0)
        if name not in self._sent:
            request.future.add_done_callback(lambda future: self._settle(name) if future.cancelled() else None)
        self._settle(name)
        self._sent[name] = replica_id, tokens
        self._own[replica_id] += tokens

    def _settle(self, name: str) -> None:
        replica_id, tokens = self._sent.pop(name, (None, 0))
        if replica_id in self._own:
            self._own[replica_id] -= tokens
