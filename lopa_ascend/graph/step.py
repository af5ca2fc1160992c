"""One decode step as one function of tensors: forward pass, scores, winners, fills, and the branches of the next step.

It has fixed shapes and reads nothing on the host. It changes three things in place: keys and values, the packed states
of the sequences, and the saved hidden states, which predict the first position of a window.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lopa_ascend.backend.interface import Entries
from lopa_ascend.graph import policy
from lopa_ascend.graph.buckets import Bucket
from lopa_ascend.graph.tensors import ModelInputs, unflatten
from lopa_ascend.model.base import ForwardInputs, Model
from lopa_ascend.parallel.collectives import Group
from lopa_ascend.score.greedy import GreedyScore
from lopa_ascend.score.prediction import float_bits
from lopa_ascend.types import Traffic


class DecodeStep:
    """The step of one bucket on one rank.

    Args:
        bp: the ranks that evaluate other branches.
        branch_acceptance: see ``DecodingParams``.
    """

    def __init__(
        self, bucket: Bucket, model: Model, score: GreedyScore, bp: Group, branch_acceptance: str = "published"
    ) -> None:
        self.bucket, self.model, self.score, self.bp = bucket, model, score, bp
        self._branch_acceptance = branch_acceptance
        entries_per_sequence = bucket.slots * bucket.entries
        num_entries = bucket.sequences * entries_per_sequence
        self._lengths = bucket.entry_lengths * (bucket.sequences * bucket.slots * bucket.spans)
        self._prefix_groups = tuple(entry // entries_per_sequence for entry in range(num_entries))
        self._prefixes = (0,) * bucket.sequences
        self._scored_shape = bucket.shape("sequences slots cells")
        # The compiler of torch 2.10 cannot trace properties of a NamedTuple.
        self._cells, self._max_cells = bucket.cells, bucket.max_cells

    def __call__(self, tensors: Sequence[Tensor], kv_lengths: Sequence[int] | Tensor) -> Tensor:
        """Runs the step; it is what a compiler compiles.

        Args:
            tensors: see ``tensors.flatten``.
            kv_lengths: keys that each attention entry sees [A]; see ``Entries``.

        Returns:
            A ``StepOutput`` as int32, one tensor after the other; see ``tensors.view_output``.
        """
        (launch, params, inputs), constants, storage, _ = unflatten(tensors)
        ops = self.model.ops
        rows, hidden = self.hidden(tensors, kv_lengths)
        scored = self.score(self.model.logits(hidden))
        predicted, bits = self._gather([column.view(self._scored_shape) for column in scored[: self.score.num_columns]])
        after, winner = policy.advance(rows, predicted, launch, params, constants, self._branch_acceptance)
        ops.put_rows(storage.states, launch.seats, policy.pack_state(after, self._max_cells))
        if self.bucket.full_attention:
            saved = storage.hidden.index_select(0, self._block_ends(inputs, winner))
            ops.put_rows(storage.hidden, inputs.save_rows.view(-1), saved)
        return torch.cat([column.reshape(-1) for column in (winner.int(), after.tokens, *bits)])

    def hidden(self, tensors: Sequence[Tensor], kv_lengths: Sequence[int] | Tensor) -> tuple[policy.Rows, Tensor]:
        """The part of the step before the scores: the branches, and the hidden states [T, hidden] that predict the
        cells of this rank's branches."""
        (launch, params, inputs), constants, storage, (k_caches, v_caches) = unflatten(tensors)
        state = policy.unpack_state(storage.states, launch, self._max_cells)
        rows = policy.branch_rows(state, launch, params, constants)
        tokens, slot_mapping = policy.rows_of_group(
            rows,
            launch,
            constants,
            self.bp.size,
            self.bp.rank,
            full_attention=self.bucket.full_attention,
        )
        forward = self._forward_inputs(inputs, tokens, slot_mapping, kv_lengths)
        hidden = self.model.forward(forward, k_caches, v_caches)
        self.model.ops.put_rows(storage.hidden, inputs.hidden_rows, hidden)
        return rows, storage.hidden.index_select(0, inputs.predicted_by)

    def _forward_inputs(
        self, inputs: ModelInputs, tokens: Tensor, slot_mapping: Tensor, kv_lengths: Sequence[int] | Tensor
    ) -> ForwardInputs:
        on_host, on_device = ((), kv_lengths) if isinstance(kv_lengths, Tensor) else (tuple(kv_lengths), None)
        entries = Entries(
            self._lengths,
            on_host,
            inputs.page_tables,
            self._prefix_groups,
            self._prefixes,
            kv_lengths_on_device=on_device,
        )
        return ForwardInputs(
            tokens=tokens.reshape(-1),
            positions=inputs.positions,
            slot_mapping=slot_mapping.view(-1),
            source=None,
            entries=entries,
            rows=None,
        )

    def _block_ends(self, inputs: ModelInputs, winner: Tensor) -> Tensor:
        """Rows of ``Storage.hidden`` with the hidden states at the ends of blocks in the winner's slot, int [S * W].
        With full attention there is one branch-parallel group, so a branch's slot has the branch's number."""
        return (inputs.block_ends + winner.int()[:, None] * self._cells).view(-1)

    def _gather(self, scored: Sequence[Tensor]) -> tuple[policy.Predicted, list[Tensor]]:
        """The predictions of all branch-parallel groups [S, B, C], and the tensors that they lie in, as int32.
        Branch i has slot i div size of group i mod size.

        Args:
            scored: this group's token ids, probabilities and, if they differ from these, confidences [S, R, C].
        """
        ids, *others = scored
        whole = float_bits(scored)
        if self.bp.size > 1:
            message = torch.stack(whole)
            num_columns, S, R, C = message.shape
            gathered = self.bp.all_gather(message, "branches").permute(1, 2, 3, 0, 4).contiguous()
            ids, *bits = gathered.view(num_columns, S, R * self.bp.size, C).unbind()
            others = [column.view(torch.float32) for column in bits]
            whole = [gathered]
        return policy.Predicted(ids, others[0], others[-1]), whole

    def traffic(self) -> list[tuple[Group, Traffic]]:
        """What a launch sends, by the group that it goes to."""
        num_computed = self.bucket.tokens
        sent = [*self.model.traffic(num_computed), *self.score.traffic(num_computed)]
        by_group = [(self.model.tp, traffic) for traffic in sent]
        if self.bp.size > 1:
            by_group.append((self.bp, Traffic("branches", 1, 4 * self.score.num_columns * num_computed)))
        return by_group
