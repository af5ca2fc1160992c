"""Runs the steps that the scheduler plans: as compiled graphs where these support a sequence, otherwise eagerly."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as List

import torch

from lopa_ascend.config import Limits
from lopa_ascend.config.parameters import AUTO_REQUESTS
from lopa_ascend.graph.executor import GraphExecutor
from lopa_ascend.probe import Probe
from lopa_ascend.runner.eager import EagerExecutor, planned
from lopa_ascend.sequence import Sequence
from lopa_ascend.types import Demand, GraphStats, SequenceResult, SequenceStep, StepPlan, StepResult


class Runner:
    """One rank's executors behind one interface.

    Args:
        limits: of requests.
        graphs: None in eager mode.
    """

    def __init__(self, eager: EagerExecutor, limits: Limits, graphs: GraphExecutor | None = None) -> None:
        self.eager, self.graphs = eager, graphs
        self._limits = limits
        self.model, self.pool, self.ops = eager.model, eager.pool, eager.ops

    def set_probe(self, probe: Probe) -> None:
        """Measures the parts of every step from now on."""
        self.eager.probe = probe
        if self.graphs is not None:
            self.graphs.probe = probe

    @property
    def num_rows(self) -> int:
        """See ``EngineStats``."""
        return self.eager.num_rows + (self.graphs.num_rows if self.graphs else 0)

    @property
    def idle_rows(self) -> int:
        """See ``EngineStats``."""
        return self.eager.idle_rows + (self.graphs.idle_rows if self.graphs else 0)

    def graph_stats(self) -> GraphStats | None:
        """None in eager mode."""
        return None if self.graphs is None else self.graphs.stats()

    def start(self, sequence: Sequence) -> None:
        """Plans the first pass of a sequence."""
        if self.graphs is not None:
            self.graphs.start(sequence)
        sequence.plan = sequence.strategy.plan()
        sequence.demand = self._demand(sequence)

    def release(self, sequence: Sequence) -> None:
        """Gives up what a sequence holds on the device. It is done, or was ended from outside."""
        if self.graphs is not None:
            self.graphs.release(sequence)

    @torch.inference_mode()
    def step(self, plan: StepPlan, sequences: Mapping[str, Sequence]) -> StepResult:
        """Makes the plan's copies and one forward pass of its sequences, and updates the sequences in place.

        A graph that is launched ahead reports its sequences in the next step. So a sequence may be in the plan and not
        in the result, and the other way round.

        Args:
            sequences: all running sequences by request id.
        """
        for copy in plan.copies:
            self.pool.copy_page(copy)
        for sequence in sequences.values():
            sequence.strategy.is_crowded = len(sequences) > AUTO_REQUESTS
        if self.graphs is None:
            results = self._run_eagerly(plan.sequences, sequences)
        else:
            launched, eager = self.graphs.launch(plan, sequences)
            results = self._run_eagerly(eager, sequences) if eager else []
            results += self.graphs.collect(launched, sequences)
        for result in results:
            sequence = sequences[result.request_id]
            sequence.demand = self._demand(sequence)
            if sequence.demand is None:
                self.release(sequence)
        return StepResult(tuple(results))

    def _run_eagerly(self, steps: List[SequenceStep], sequences: Mapping[str, Sequence]) -> list[SequenceResult]:
        return self.eager.run([sequences[step.request_id] for step in steps], steps)

    def _demand(self, sequence: Sequence) -> Demand | None:
        """What the sequence's next step needs; None when the sequence is done or has failed."""
        if sequence.plan is None:
            return None
        self._drop_excess_branches(sequence)
        demand = self.eager.placement.demand(sequence.plan)
        return demand if self.graphs is None else self.graphs.demand(sequence, demand)

    def _drop_excess_branches(self, sequence: Sequence) -> None:
        """Drops lookahead branches that do not fit into one step, see ``Limits.max_branches``; the best ones stay. A
        graph computes all of a sequence's branches: what it can compute is decided by its bucket."""
        plan = planned(sequence)
        max_branches = self._limits.max_branches(max(len(row.tokens) for row in plan.rows))
        if len(plan.rows) > max_branches and (self.graphs is None or not self.graphs.decodes(sequence)):
            sequence.plan = sequence.strategy.keep(plan, max_branches - 1)
