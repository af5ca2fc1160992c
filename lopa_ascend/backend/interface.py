"""The interface of the fused ops, which every device implements, and the attention entries.

Sizes in shapes: T tokens of a step (all rows of all sequences, one after the other), H query heads, K key/value heads,
D head dimension, N pages, W cache positions that are written. The keys, or the values, of one layer are a cache
[N, 128, K, D]; a flat cache position is page * 128 + offset. Unless something else is said, the tensors of a call have
one float dtype, that of the model, and lie on ``Ops.device``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lopa_ascend.config import ExpertsConfig, divided_length

FP8 = torch.float8_e4m3fn
"""Numbers with 3 bits of mantissa, up to 448, without infinity."""


@dataclass(frozen=True, eq=False)
class Entries:
    """The attention entries of a step: which queries attend to which positions.

    An entry is a span of consecutive queries with one page table and one KV length: each of its queries attends to all
    positions of the page table below that length, so no mask is needed. In a causal entry the last query does, and each
    one before it to a position less: its own is the last that it sees. The spans cover the tokens of the step in order.
    Entries are compared by identity.
    """

    lengths: tuple[int, ...]
    """Queries of each entry; their sum is T."""
    kv_lengths: tuple[int, ...]
    """For each entry how many positions its queries attend to, from position 0 on; empty if they are on the device."""
    page_tables: Tensor
    """Page ids of each entry in the order of positions, int32 [entries, pages]. Columns after the pages that an entry
    needs hold ids of any pages."""
    prefix_groups: tuple[int, ...]
    """For each entry its prefix group, an index into ``prefixes``."""
    prefixes: tuple[int, ...]
    """Prefix lengths. All entries of a group share these keys and values, which are committed or written alike for all
    of them by this step. So attention may read them once, through the page table of any entry. Every entry attends to
    at least one position after the prefix."""
    kv_lengths_on_device: Tensor | None = None
    """The KV lengths in a compiled step of a device whose kernels read them in its memory, int32 [entries]."""
    causal: tuple[bool, ...] = ()
    """For each entry whether it is causal; empty if none is. All queries of a causal entry lie in one page, and its
    prefix ends where that page begins. So a query attends in the same two parts, with the same bits, whatever
    queries are computed beside it: a prompt in pieces is computed as at once."""

    def divided(self, max_queries: int | None) -> Entries:
        """Entries for the same attention, of at most ``max_queries`` queries each (None: any number). Each part has its
        own KV length and page table."""
        parts_by_entry = [divided_length(length, max_queries) for length in self.lengths]
        if all(len(parts) == 1 for parts in parts_by_entry):
            return self
        entry_of_part = [index for index, parts in enumerate(parts_by_entry) for _ in parts]
        causal = tuple(self.causal[index] for index in entry_of_part) if self.causal else ()
        behind = [sum(parts[number + 1 :]) for parts in parts_by_entry for number in range(len(parts))]
        return Entries(
            lengths=tuple(chain.from_iterable(parts_by_entry)),
            kv_lengths=tuple(
                self.kv_lengths[index] - (behind[part] if causal and causal[part] else 0)
                for part, index in enumerate(entry_of_part)
            ),
            page_tables=self.page_tables.index_select(0, torch.tensor(entry_of_part, device=self.page_tables.device)),
            prefix_groups=tuple(self.prefix_groups[index] for index in entry_of_part),
            prefixes=self.prefixes,
            causal=causal,
        )


class RowStats(NamedTuple):
    """Statistics of n rows of logits, float32 [n] except for ``column``. Shares are given as logarithms, for a share
    itself may underflow beside ids that are never chosen."""

    best: Tensor
    """The largest logit of an id that may be chosen."""
    log_share: Tensor
    """Logarithm of its share of the row's softmax."""
    log_total: Tensor
    """Logarithm of the denominator of the row's softmax."""
    rest: tuple[Tensor, ...]
    """What the confidence needs in addition: for "margin" the logarithm of the largest share of another id, for
    "neg_entropy" the sum of p log p."""
    column: Tensor
    """The column of ``best``, the first one among equals; an integer."""


RowStatsKernel = Callable[[Tensor, Tensor, str], RowStats]
"""``row_stats(logits, never_chosen, confidence)`` of rows of logits [n, V]. never_chosen, float32 [V], is -inf for
columns that keep their share but are never chosen, and otherwise 0. A row with a logit that is NaN or +inf has the
log_total NaN, and any column."""


RopeWriteKernel = Callable[
    [
        Tensor,
        "tuple[Tensor, Tensor] | None",
        float,
        tuple[Tensor, Tensor],
        tuple[Tensor, Tensor],
        Tensor,
        "Tensor | None",
    ],
    Tensor,
]
"""``rope_and_write(qkv, norms, eps, (cos, sin), (k_cache, v_cache), slot_mapping, source)`` of the queries, keys and
values of tokens side by side, [T, H + 2 * K, D] -> [T, H, D]: the queries rotated as by ``rope``, or by ``norm_rope``
with the two weights ``norms``. Keys that are rotated alike, and values as they are, are written as by ``kv_write``. cos
and sin have a row for all heads, or for each of the H + 2 * K."""


ShardStatsKernel = Callable[[Tensor, int, int, bool], Tensor]
"""``shard_stats(logits, mask, limit, has_dot)`` of rows of logits [n, V]: float32 [n, 4] with the largest logit, the
sum of exp x with x = logit - largest, and the largest logit that may be chosen with the first column that has it; with
``has_dot`` [n, 5], third the sum of x exp x. The column ``mask`` and those from ``limit`` on may not be chosen. If a
logit is NaN or +inf, so is the largest, and the sum is NaN."""


@dataclass(frozen=True, eq=False)
class Experts:
    """A rank's part of the experts of a layer: E experts, each with I inner elements.

    So they are before ``Ops.stored_experts``.
    """

    sizes: ExpertsConfig
    """Of the whole model."""
    router: Tensor
    """Float32 [E, hidden]."""
    bias: Tensor
    """What is added to the scores for the choice alone, float32 [E]."""
    gate_up: Tensor
    """[E, 2 * I, hidden]; int8 if there are scales."""
    down: Tensor
    """[E, hidden, I]; int8 if there are scales."""
    gate_up_scale: Tensor | None = None
    """Of each output, float32 [E, 2 * I]."""
    down_scale: Tensor | None = None
    """Float32 [E, hidden]."""


class Int4Weight(NamedTuple):
    """The weight of a linear layer in groups of G = 32, 64 or 128 inputs: w[o, i] = (code - zero) * scale of its group.
    These are the forms that ``Ops.stored_int4`` takes; what it returns may hold the same in an order of its own."""

    codes: Tensor
    """Two codes 0..15 a byte, the even input in the low four bits: uint8 [out, in / 2]."""
    scale: Tensor
    """Float32 [out, in / G]."""
    zero: Tensor | None
    """The code that means 0, uint8 [out, in / G]; None: it is 8 everywhere."""


class Ops(Protocol):
    """The fused ops of one device. ``backend/cpu/definition.py`` defines what each of them computes."""

    gathered_bytes: int
    """Bytes of keys and values that attention has copied out of the pages since the start, in all layers; 0 where the
    kernels read pages in place."""
    device: torch.device
    """Where the tensors of all calls lie."""
    max_queries: int | None
    """Queries that an attention entry has at most; None for any number. Callers divide longer entries on the host, by
    ``Entries.divided``."""
    score_rows: int | None
    """Rows of logits that are best scored at a time; None for any number."""

    # ---- linear layers ---------------------------------------------------------------------------------------------

    def stored(self, weight: Tensor) -> Tensor:
        """The weight [out, in] of a linear layer in the layout that ``linear`` of this device takes."""
        ...

    def packed(self, weight: Tensor) -> Tensor:
        """What ``stored`` returned, in an order that is faster, where this device has one. It may be an opaque tensor,
        which only these ops take and no traced graph may hold."""
        ...

    def settle(self, weights: Iterable[Tensor]) -> str:
        """Decides at start how ``linear`` computes, so that no row depends on the others. ``weights``: one for each
        linear layer, as ``stored`` or ``packed`` returned them. Returns what is known of the independence of rows, in
        words."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A linear layer of x [T, in] -> [T, out]. The result of a row does not depend on the other rows.

        Args:
            weight: what ``stored`` or ``packed`` returned for the weight [out, in].
            bias: [out].
        """
        ...

    def quantize(self, x: Tensor, codes: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
        """x [T, in] as codes, and a scale for each row, float32 [T].

        The scale of a row is its largest magnitude divided by the codes' largest, and 0 for a row of zeros. Values are
        rounded half to even. The dtype ``codes`` is int8, with numbers up to 127, or FP8, up to 448. Not every device
        has the latter.
        """
        ...

    def quant_linear(
        self,
        codes: Tensor,
        scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """A linear layer of codes -> [T, out] of ``dtype``. The products of int8 are summed exactly; those of FP8 too
        on a CPU, while a GPU rounds sums. The result of a row does not depend on the other rows.

        Args:
            codes: int8 or FP8 [T, in].
            scale: of each row of ``codes``, float32 [T].
            weight: what ``stored`` or ``packed`` returned for the weight [out, in] of the same dtype.
            weight_scale: of each output, float32 [out].
            bias: [out].
        """
        ...

    def stored_int4(self, weight: Int4Weight) -> Int4Weight:
        """An int4 weight in the layout that ``int4_linear`` of this device takes."""
        ...

    def int4_linear(
        self, codes: Tensor, scale: Tensor, weight: Int4Weight, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """A linear layer of int8 activations and an int4 weight -> [T, out] of ``dtype``.

        The products of a group are summed exactly, and rounded to float32. Times the scale of the group they are added
        up, group after group; each operation is rounded to float32. The result of a row does not depend on the others.

        Args:
            codes: int8 [T, in].
            scale: of each row of ``codes``, float32 [T].
            weight: what ``stored_int4`` returned.
            bias: [out].
        """
        ...

    # ---- mixtures of experts -----------------------------------------------------------------------------------------

    def stored_experts(self, experts: Experts) -> Experts:
        """The experts of a layer in the form that ``moe`` of this device takes."""
        ...

    def moe(self, x: Tensor, experts: Experts, shared: Tensor | None = None) -> Tensor:
        """The weighted sum of the MLPs of the experts that each token of x [T, hidden] takes -> [T, hidden]; added to
        ``shared`` of the same shape, before or after it is rounded.

        A token's scores are the sigmoids of the router's outputs, computed in float32. Its experts are the best by
        score + bias among those of the best groups, which are ranked by the sum of their two best; the lower index goes
        first among equals. Their weights are their scores, divided by the sum of these + 1e-20 if they are several,
        times ``scale``. The result of a row does not depend on the other rows.
        """
        ...

    # ---- norms and activations -------------------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm of x [T, hidden] with a weight [hidden], computed in float32."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and x + residual. May overwrite the residual."""
        ...

    def rms_norm_quant(
        self, x: Tensor, weight: Tensor, eps: float, codes: torch.dtype = torch.int8
    ) -> tuple[Tensor, Tensor]:
        """``quantize`` of the norm, which a device may round to the dtype of x before."""
        ...

    def add_rms_norm_quant(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, codes: torch.dtype = torch.int8
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``rms_norm_quant`` of x + residual, and x + residual. May overwrite the residual."""
        ...

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of gate and up side by side, [T, 2 * I] -> [T, I]."""
        ...

    def swiglu_quant(self, gate_up: Tensor, codes: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
        """``quantize`` of ``swiglu``. A device may quantise before it rounds."""
        ...

    def quant_swiglu(
        self, codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """``swiglu_quant`` of ``quant_linear`` without a bias, whose products a device may leave unrounded, in codes
        of the same dtype."""
        ...

    # ---- rotary embeddings -----------------------------------------------------------------------------------------

    def rope_tables(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The tables of cosines and sines that ``rope`` of this device takes rows of, [positions, 1, ...] of ``dtype``.
        ``cos`` and ``sin``: float32 [positions, D / 2]."""
        ...

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates the pairs (x[i], x[i + D / 2]) of every head of x [T, heads, D].

        Args:
            cos: the rows of the tokens' positions of the first table that ``rope_tables`` returned: [T, 1, ...], or
                [T, heads, ...] if the angles of the heads differ.
            sin: the same rows of the second table.
        """
        ...

    def norm_rope(
        self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Norms every head of queries [T, H, D] and of keys [T, K, D], then rotates it as ``rope`` does.

        Args:
            q, k: may be parts of larger tensors.
            q_weight, k_weight: of the RMSNorm over D of each head, [D]. A device may round the norm before it rotates.
            cos, sin: as for ``rope``, [T, 1, ...].
        """
        ...

    # ---- keys and values -------------------------------------------------------------------------------------------

    def kv_write(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, source: Tensor | None = None
    ) -> None:
        """Writes keys and values [T, K, D] of tokens into the caches [N, 128, K, D] of a layer.

        Args:
            slot_mapping: the flat cache positions that are written, int32 or int64 [W]. They are distinct.
            source: the token that each of them takes, int32 or int64 [W]; None: position i takes token i, and W is T.
        """
        ...

    @property
    def rope_and_write(self) -> RopeWriteKernel | None:
        """A kernel that rotates queries and keys, and writes keys and values, or None: then it is done op by op."""
        ...

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, entries: Entries) -> Tensor:
        """Attention of queries [T, H, D] over the pages [N, 128, K, D] of a layer, entry by entry -> [T, H * D].

        The result of an entry does not depend on the other entries. Its last bits may depend on the length of its
        prefix, because a device may attend to prefix and rest separately and merge the two.
        """
        ...

    @property
    def row_stats(self) -> RowStatsKernel | None:
        """A kernel that makes the statistics of rows of logits for a compiled step, or None: then torch makes them."""
        ...

    @property
    def shard_stats(self) -> ShardStatsKernel | None:
        """A kernel that makes the statistics of rows of logits in an eager step, or None: then torch makes them."""
        ...

    # ---- memory of compiled steps ----------------------------------------------------------------------------------

    def put_rows(self, x: Tensor, rows: Tensor, values: Tensor) -> None:
        """Writes values [n, C] to the distinct rows int32 [n] of x [M, C], of any dtype."""
        ...

    def host_memory(self, size: int) -> Tensor:
        """Memory of the host, int32 [size], from which copies to the device run while the host goes on."""
        ...

    def read_later(self, x: Tensor, while_waiting: Callable[[float], None]) -> Callable[[], Tensor]:
        """Starts a copy of x to the host. The returned function waits for it (``Group.while_waiting``) and
        returns it."""
        ...


class RunningProfile(Protocol):
    """A profile of this process."""

    def start(self) -> None:
        """Begins it."""

    def step(self) -> None:
        """A step of the engine has ended."""

    def stop(self) -> None:
        """Ends the profile, and writes it unless its last step has done so."""


class Profiler(Protocol):
    """How a device records what it computes."""

    def mark(self, name: str) -> AbstractContextManager[object]:
        """Shows what it encloses as a range in profiles."""

    def start_profile(self, folder: Path, worker: str, delay: int, steps: int) -> RunningProfile:
        """Begins a profile in ``folder``, which writes itself after its last step.

        Args:
            worker: the trace's name begins with it.
            delay: steps that are left out. One more warms the profiler up.
            steps: steps that are recorded.
        """
