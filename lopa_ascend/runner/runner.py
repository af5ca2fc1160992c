"""Runs the steps that the scheduler plans: as compiled graphs where these support a sequence, otherwise eagerly."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import torch

from lopa_ascend.config import Limits
from lopa_ascend.decode.allotment import Allotment, Applicant
from lopa_ascend.graph.executor import GraphExecutor
from lopa_ascend.probe import Probe
from lopa_ascend.runner.eager import EagerExecutor, planned
from lopa_ascend.sequence import Sequence
from lopa_ascend.types import Demand, GraphStats, SequencePlan, SequenceResult, SequenceStep, StepPlan, StepResult


class Runner:
    """One rank's executors behind one interface.

    Attributes:
        allotment: decides how many branches a request gets if their number follows the load. It must be set before the
            first step of such a request.

    Args:
        limits: of requests.
        graphs: None in eager mode.
    """

    def __init__(self, eager: EagerExecutor, limits: Limits, graphs: GraphExecutor | None = None) -> None:
        self.eager, self.graphs = eager, graphs
        self._limits = limits
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
            results = self._run_eagerly(plan.sequences, sequences, [])
        else:
            launched, eager = self.graphs.launch(plan, sequences)
            eager_ids = {step.request_id for step in eager}
            beside = [sequences[step.request_id] for step in plan.sequences if step.request_id not in eager_ids]
            results = self._run_eagerly(eager, sequences, beside) if eager else []
            results += self.graphs.collect(launched, sequences)
        for result in results:
            sequence = sequences[result.request_id]
            sequence.demand = self._demand(sequence)
            if sequence.demand is None:
                self.release(sequence)
        return StepResult(tuple(results))

    def _run_eagerly(
        self,
        steps: tuple[SequenceStep, ...] | list[SequenceStep],
        sequences: Mapping[str, Sequence],
        beside: list[Sequence],
    ) -> list[SequenceResult]:
        """Runs a step eagerly. The allotment decides how many branches those sequences get whose number of branches
        follows the load, and learns from the results.

        Args:
            steps: what to run.
            sequences: all running sequences by request id.
            beside: the other sequences of the step, which graphs decode.
        """
        chosen = [sequences[step.request_id] for step in steps]
        by_load = [
            sequence for sequence in chosen if sequence.request.params.follows_load and sequence.plan is not None
        ]
        if not by_load:
            return self.eager.run(chosen, steps)
        assert self.allotment is not None
        others = [self._num_computed(sequence) for sequence in chosen if sequence not in by_load]
        others += [sequence.demand.num_computed for sequence in beside if sequence.demand is not None]
        applicants = self._allot_branches(self.allotment, by_load, others)
        start = time.perf_counter()
        results = self.eager.run(chosen, steps)
        self.allotment.observe(time.perf_counter() - start)
        for result in results:
            applicant = applicants.get(result.request_id)
            if applicant is not None and result.record is not None:
                strategy = sequences[result.request_id].strategy
                self.allotment.learn(applicant, result.record, strategy.saved_by_a_win, strategy.wins_of_dropped)
        return results

    def _allot_branches(self, allotment: Allotment, by_load: list[Sequence], others: list[int]) -> dict[str, Applicant]:
        """Keeps as many lookahead branches of each sequence in ``by_load`` as the allotment gives it.

        Args:
            allotment: what decides.
            by_load: the sequences.
            others: the tokens that each other sequence of the step computes.

        Returns:
            By request id: what the allotment was asked.
        """
        applicants = [self._applicant(sequence) for sequence in by_load]
        counts = allotment.choose(applicants, others)
        for sequence, count in zip(by_load, counts, strict=True):
            sequence.plan = sequence.strategy.keep(planned(sequence), count)
        return {sequence.request_id: applicant for sequence, applicant in zip(by_load, applicants, strict=True)}

    def _applicant(self, sequence: Sequence) -> Applicant:
        strategy = sequence.strategy
        return Applicant(strategy.params, strategy.is_stuck, self.eager.placement.costs(planned(sequence)))

    def _num_computed(self, sequence: Sequence) -> int:
        """The tokens that the busiest branch-parallel group computes in a sequence's next pass."""
        return self.eager.placement.demand(planned(sequence)).num_computed

    def _demand(self, sequence: Sequence) -> Demand | None:
        """What the sequence's next step needs; None when the sequence is done or has failed."""
        if sequence.plan is None:
            return None
        self._drop_excess_branches(sequence)
        demand = self.eager.placement.demand(sequence.plan)
        if sequence.request.params.follows_load:
            demand = self._demand_by_load(sequence.plan, demand)
        return demand if self.graphs is None else self.graphs.demand(sequence, demand)

    def _drop_excess_branches(self, sequence: Sequence) -> None:
        """Drops lookahead branches that do not fit into one step, see ``Limits.max_branches``; the best ones stay. A
        graph computes all of a sequence's branches: what it can compute is decided by its bucket."""
        plan = planned(sequence)
        max_branches = self._limits.max_branches(max(len(row.tokens) for row in plan.rows))
        if len(plan.rows) > max_branches and (self.graphs is None or not self.graphs.decodes(sequence)):
            sequence.plan = sequence.strategy.keep(plan, max_branches - 1)

    def _demand_by_load(self, plan: SequencePlan, demand: Demand) -> Demand:
        """The demand of a sequence whose branches follow the load, from that of all its branches.

        Tokens are counted for the anchor alone, because lookahead branches only get what room is left. Where some are
        dropped the anchor takes the slot of the first of them, so each used slot must have room for the anchor.
        """
        anchor_end = plan.rows[-1].end
        slot_ends = tuple(max(end, anchor_end) if end else 0 for end in demand.slot_ends)
        return replace(demand, num_computed=self.eager.placement.costs(plan)[0], slot_ends=slot_ends)
