"""Runs the steps that the scheduler plans: as compiled graphs where these support a sequence, otherwise eagerly."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import torch

from lopa_ascend.decode.allotment import Allotment, Ask
from lopa_ascend.graph.executor import GraphExecutor
from lopa_ascend.probe import Probe
from lopa_ascend.runner.eager import EagerExecutor, planned
from lopa_ascend.sequence import Sequence
from lopa_ascend.types import Demand, GraphStats, SequenceResult, SequenceStep, StepPlan, StepResult


class Runner:
    """One rank's executors behind one interface.

    Attributes:
        allotment: decides how many branches the requests have whose ``num_branches`` follows the load; needed before
            the first step of such a request.

    Args:
        graphs: None in eager mode.
    """

    def __init__(self, eager: EagerExecutor, graphs: GraphExecutor | None = None) -> None:
        self.eager, self.graphs = eager, graphs
        self.allotment: Allotment | None = None
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

    def _run_eagerly(
        self, steps: tuple[SequenceStep, ...] | list[SequenceStep], sequences: Mapping[str, Sequence]
    ) -> list[SequenceResult]:
        chosen = [sequences[step.request_id] for step in steps]
        followers = [s for s in chosen if s.request.params.follows_load and s.plan is not None]
        if not followers:
            return self.eager.run(chosen, steps)
        assert self.allotment is not None
        others = [self._num_computed(s) for s in chosen if s not in followers]
        asks = [Ask(s.strategy.params, s.strategy.is_stuck, self.eager.placement.costs(planned(s))) for s in followers]
        for sequence, count in zip(followers, self.allotment.choose(asks, others), strict=True):
            sequence.plan = sequence.strategy.keep(planned(sequence), count)
        start = time.perf_counter()
        results = self.eager.run(chosen, steps)
        self.allotment.observe(time.perf_counter() - start)
        asked = {sequence.request_id: ask for sequence, ask in zip(followers, asks, strict=True)}
        for result in results:
            if result.record is not None and result.request_id in asked:
                strategy = sequences[result.request_id].strategy
                ask = asked[result.request_id]
                self.allotment.learn(ask, result.record, strategy.saved_by_a_win, strategy.given_up)
        return results

    def _num_computed(self, sequence: Sequence) -> int:
        return self.eager.placement.demand(planned(sequence)).num_computed

    def _demand(self, sequence: Sequence) -> Demand | None:
        """What the sequence's next step needs; None when the sequence is done or has failed."""
        if sequence.plan is None:
            return None
        exact = self.eager.placement.demand(sequence.plan)
        if sequence.request.params.follows_load:  # the allotment gives lookahead branches what room is left
            exact = replace(exact, num_computed=self.eager.placement.costs(sequence.plan)[0])
        return exact if self.graphs is None else self.graphs.demand(sequence, exact)
