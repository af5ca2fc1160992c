"""A decode step as one function of tensors: forward pass, scores, winners, fills, and the branches of the next step.

It has fixed shapes and reads nothing on the host. It changes in place keys and values, the sequences' packed states,
and the saved hidden states, which predict the first position of a window.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lopa_ascend.backend.interface import Entries
from lopa_ascend.graph import policy
from lopa_ascend.graph.buckets import Bucket
from lopa_ascend.graph.tensors import Caches, ModelInputs, StepInputs, Storage, unflatten, unpacked
from lopa_ascend.model.base import ForwardInputs, Model
from lopa_ascend.parallel.collectives import Group
from lopa_ascend.score.greedy import GreedyScore
from lopa_ascend.score.prediction import float_bits
from lopa_ascend.types import Traffic


class DecodeStep:
    """The step of one bucket on one rank. ``bp``: the ranks that evaluate other branches."""

    def __init__(
        self, bucket: Bucket, model: Model, score: GreedyScore, bp: Group, branch_acceptance: str = "published"
    ) -> None:
        self.bucket, self.model, self.score, self.bp = bucket, model, score, bp
        self._branch_acceptance = branch_acceptance
        self._lengths = bucket.entry_lengths * (bucket.all_entries // len(bucket.entry_lengths))
        self._prefix_groups = (0,) * bucket.all_entries
        self._scored_shape = bucket.shape("sequences slots cells")
        # The compiler of torch 2.10 cannot trace properties of a NamedTuple.
        self._cells, self._max_cells, self._length = bucket.cells, bucket.max_cells, bucket.block_length
        self._blocks_shape, self._entries_per_row = bucket.shape("sequences slots blocks"), len(bucket.entry_lengths)

    def __call__(self, tensors: Sequence[Tensor], kv_lengths: Sequence[int] | Tensor) -> Tensor:
        """Runs the step; it is what a compiler compiles. ``tensors``: see ``tensors.flatten``; ``kv_lengths``: keys
        that each attention entry sees [A]. Returns a ``StepOutput`` as int32, one tensor after the other
        (``tensors.view_output``)."""
        (launch, params, inputs), constants, storage, _ = self._unflatten(tensors)[0]
        ops = self.model.ops
        rows, layout, hidden = self.hidden(tensors, kv_lengths)
        scored = self.score(self.model.logits(hidden))[: self.score.num_columns]
        own = [self.of_slots(column, layout).view(self._scored_shape) for column in scored]
        predicted, bits = self._gather(own)
        after, winner = policy.advance(rows, predicted, launch, params, constants, self._branch_acceptance)
        ops.put_rows(storage.states, launch.seats, policy.pack_state(after, self._max_cells))
        if self.bucket.full_attention:
            saved = storage.hidden.index_select(0, self._block_ends(inputs, winner))
            ops.put_rows(storage.hidden, inputs.save_rows.view(-1), saved)
        return torch.cat([column.reshape(-1) for column in (winner.int(), after.tokens, *bits)])

    def hidden(
        self, tensors: Sequence[Tensor], kv_lengths: Sequence[int] | Tensor
    ) -> tuple[policy.Rows, policy.Layout | None, Tensor]:
        """The step before the scores: the branches; in a packed bucket, where blocks are computed; and the hidden
        states [T, hidden] that predict the cells of the computed tokens."""
        ((launch, params, inputs), constants, storage, caches), packing = self._unflatten(tensors)
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
        page_tables, source, predicted_by, layout = inputs.page_tables, None, inputs.predicted_by, None
        if packing is not None:
            layout = policy.layout(rows, launch, packing, constants, self.bp.size)
            tokens = tokens.reshape(-1, self._length).index_select(0, layout.blocks)
            slots = layout.slots[:, None].expand(-1, self._entries_per_row).reshape(-1)
            page_tables = inputs.page_tables.index_select(0, slots)
            source = packing.token_numbers.index_select(0, layout.rows).view(-1)
            if self.bucket.logit_shift:
                predicted_by = self._predicted_by(inputs, packing, layout)
        on_host, on_device = ((), kv_lengths) if isinstance(kv_lengths, Tensor) else (tuple(kv_lengths), None)
        entries = Entries(self._lengths, on_host, page_tables, self._prefix_groups, (0,), on_device)
        forward = ForwardInputs(tokens.reshape(-1), inputs.positions, slot_mapping.view(-1), source, entries, rows=None)
        hidden = self.model.forward(forward, *caches)
        self.model.ops.put_rows(storage.hidden, inputs.hidden_rows, hidden)
        return rows, layout, storage.hidden.index_select(0, predicted_by)

    def of_slots(self, column: Tensor, layout: policy.Layout | None) -> Tensor:
        """Values of all slots' tokens, from those of the computed tokens [T]."""
        if layout is None:
            return column
        return column.view(-1, self._length).index_select(0, layout.rows).view(-1)

    def _unflatten(
        self, tensors: Sequence[Tensor]
    ) -> tuple[tuple[StepInputs, policy.Constants, Storage, Caches], policy.Packing | None]:
        """As ``tensors.unflatten``, and the packing of a packed bucket."""
        if self.bucket.rows is None:
            return unflatten(tensors), None
        others, packing = unpacked(tensors)
        return unflatten(others), packing

    def _predicted_by(self, inputs: ModelInputs, packing: policy.Packing, layout: policy.Layout) -> Tensor:
        """``ModelInputs.predicted_by`` of a packed bucket. Another slot may compute the block before a block-row's."""
        S, R, W = self._blocks_shape
        ends = packing.end_rows.index_select(0, layout.rows).view(S, R, W)
        before = torch.cat([packing.rows_before.view(S, 1, 1).expand(S, R, 1), ends[..., :-1]], 2)
        first = before.view(-1).index_select(0, layout.blocks)
        others = inputs.predicted_by.view(-1, self._length)[:, 1:]
        return torch.cat([first[:, None], others], 1).view(-1)

    def _block_ends(self, inputs: ModelInputs, winner: Tensor) -> Tensor:
        """Rows of ``Storage.hidden`` at the ends of blocks in the winner's slot, int [S * W]. With full attention there
        is one branch-parallel group, so a branch and its slot have the same number."""
        return (inputs.block_ends + winner.int()[:, None] * self._cells).view(-1)

    def _gather(self, scored: Sequence[Tensor]) -> tuple[policy.Predicted, list[Tensor]]:
        """The predictions of all branch-parallel groups [S, B, C], and the tensors that they lie in, as int32. Branch i
        has slot i div size of group i mod size. ``scored``: this group's token ids, probabilities and, if they differ
        from these, confidences [S, R, C]."""
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
        """What a launch sends, with the receiving group."""
        num_computed = self.bucket.tokens
        sent = [*self.model.traffic(num_computed), *self.score.traffic(num_computed)]
        by_group = [(self.model.tp, traffic) for traffic in sent]
        if self.bp.size > 1:
            by_group.append((self.bp, Traffic("branches", 1, 4 * self.score.num_columns * self.bucket.writes)))
        return by_group
