"""Runs the steps that the scheduler plans: as compiled graphs where these support a sequence, otherwise eagerly."""

from __future__ import annotations

from collections.abc import Collection

import torch

from lopa_ascend.admission import Limits
from lopa_ascend.config.parameters import AUTO_REQUESTS
from lopa_ascend.core import Result, Sequence, Step
from lopa_ascend.graph.executor import GraphExecutor
from lopa_ascend.probe import Probe
from lopa_ascend.runner.eager import EagerExecutor
from lopa_ascend.types import GraphStats


class Runner:
    """One rank's executors behind one interface. ``graphs``: None in eager mode."""

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
        return self.eager.num_rows + (self.graphs.num_rows if self.graphs else 0)

    @property
    def idle_rows(self) -> int:
        return self.eager.idle_rows + (self.graphs.idle_rows if self.graphs else 0)

    def graph_stats(self) -> GraphStats | None:
        """None in eager mode."""
        compiled = self.graphs or self.eager.forwards
        return None if compiled is None else compiled.stats()

    def start(self, sequence: Sequence) -> None:
        if self.graphs is not None:
            self.graphs.start(sequence)
        sequence.plan = sequence.strategy.plan()
        self._ask(sequence)

    def release(self, sequence: Sequence) -> None:
        """Gives up what a sequence that has ended holds on the device."""
        if self.graphs is not None:
            self.graphs.release(sequence)

    @torch.inference_mode()
    def step(self, step: Step, running: Collection[Sequence]) -> list[Result]:
        """Makes the step's copies and one forward pass of its sequences, and updates these in place. A graph that is
        launched ahead reports its sequences in the next step. So a sequence may be in the step and not in the results,
        and the other way round."""
        for copy in step.copies:
            self.pool.copy_page(copy)
        for sequence in running:
            sequence.strategy.is_crowded = len(running) > AUTO_REQUESTS
        if self.graphs is None:
            results = self.eager.run(step.sequences)
        else:
            launched, eager = self.graphs.launch(step)
            results = self.eager.run(eager) if eager else []
            results += self.graphs.collect(launched)
        for sequence, _ in results:
            if sequence.plan is None:
                self.release(sequence)
            else:
                self._ask(sequence)
        return results

    def _ask(self, sequence: Sequence) -> None:
        self._drop_excess_branches(sequence)
        placement, plan = self.eager.placement, sequence.next_pass
        sequence.num_computed, sequence.slot_ends = placement.num_computed(plan), placement.slot_ends(plan)
        if self.graphs is not None:
            self.graphs.ask(sequence)

    def _drop_excess_branches(self, sequence: Sequence) -> None:
        """Drops the worst lookahead branches that do not fit into one step (``Limits.max_branches``). A graph computes
        all branches of a sequence: its bucket decides what it can."""
        plan = sequence.next_pass
        max_branches = self._limits.max_branches(max(len(row.tokens) for row in plan.rows))
        if len(plan.rows) > max_branches and (self.graphs is None or not self.graphs.decodes(sequence)):
            sequence.plan = plan.keep(max_branches - 1)
