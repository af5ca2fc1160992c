"""Checks at start that compiled steps compute what the same steps compute op by op, on random tokens, positions, pages
and KV lengths, which are the same on all ranks.

What is written goes to padding positions. This check's page tables hold these beside pages of random keys and values,
so attention reads what the step has just written. Decisions are compared in every step, with those of ``decode/``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from lopa_ascend.backend.compiler import MIN_KV_LENGTH, Compiler, GraphError, Run
from lopa_ascend.kv.pages import PAGE_SIZE, pages_for
from lopa_ascend.kv.pool import KVPool
from lopa_ascend.model.base import Model
from lopa_ascend.score.greedy import GreedyScore, Scored

MAX_KEYS = 512
"""Most keys of an entry; a CPU would compute long with more."""
MAX_PAGES = 32
ROWS = 256
"""Rows scored at a time: the device has no memory left for the logits of a whole step."""
EXACT, ROUNDED = (0.01, 0.1), (0.2, 1.5)
"""Differences of log probabilities that half of a block's rows, and all rows, keep within: in float32, and in narrower
dtypes, in which inductor's sums and those of single ops differed by up to 0.05 and 0.4."""
_T = TypeVar("_T")
logger = logging.getLogger(__name__)


class StepCheck:
    """Compares the compiled steps of one rank. Fills the pages of ``pool`` with random values."""

    def __init__(self, compiler: Compiler, model: Model, pool: KVPool, num_token_ids: int) -> None:
        self._compiler, self._model, self._pool = compiler, model, pool
        own_ids = range(model.first_token_id, model.first_token_id + model.local_vocab_size)
        mask = model.config.mask_token_id
        # With the margin as confidence it tells how near the second best token is.
        self._score = GreedyScore(own_ids, mask, num_token_ids, model.tp, model.ops, "margin")
        self._num_pages = min(pool.num_pages, MAX_PAGES)
        self._seconds = 0.0
        self._fill_pages()

    def _fill_pages(self) -> None:
        random = torch.Generator().manual_seed(0)
        for half in (self._pool.k, self._pool.v):
            shape = self._num_pages, *half[0].shape[1:]
            values = torch.randn(shape, generator=random).to(half[0].dtype).to(half[0].device)
            for layer, cache in enumerate(half):
                cache[: self._num_pages] = values.roll(layer, 0)

    def write(
        self,
        tokens: Tensor,
        positions: Tensor,
        page_tables: Tensor,
        num_entries: int,
        num_written: int,
        length: int,
    ) -> list[int]:
        """Writes random inputs of a step into these tensors on the device, the same in every call; half of the tokens
        are masks. Clears the ``num_written`` padding positions that the step will write. Returns the KV length of each
        entry, which is ``length``, the positions of a block, at least."""
        random = torch.Generator().manual_seed(tokens.numel())

        def below(limit: int, *shape: int) -> Tensor:
            return torch.randint(limit, shape, generator=random, dtype=torch.int32)

        config, (num_tables, width) = self._model.config, page_tables.shape
        ids, is_mask = below(config.vocab_size, *tokens.shape), below(2, *tokens.shape) == 0
        first_padding, num_padding = self._pool.num_pages, pages_for(num_written)
        pages = below(self._num_pages + num_padding, num_tables, width)
        pages += torch.where(pages < self._num_pages, 0, first_padding - self._num_pages)
        least = max(length, MIN_KV_LENGTH)
        most = max(least, min(width * PAGE_SIZE, MAX_KEYS))
        num_positions = max((width - 1) * PAGE_SIZE, length)  # a sequence may have fewer than its pages have
        for target, values in (
            (tokens, torch.where(is_mask, config.mask_token_id, ids)),
            (positions, below(num_positions, *positions.shape)),
            (page_tables, pages),
        ):
            target.copy_(values)
        for cache in (*self._pool.k, *self._pool.v):
            cache[first_padding : first_padding + num_padding] = 0
        lengths: list[int] = (least + below(most - least + 1, num_entries)).tolist()
        return [most, *lengths[1:]]

    def expected(self, name: str, step: Run, kv_lengths: list[int]) -> Scored:
        """What a step predicts op by op, with margins as confidences. ``step`` gives the hidden states [T, hidden] that
        predict tokens."""
        return self._timed(lambda: self.scored(self._compiler.launch(step, f"{name}, op by op", kv_lengths)))

    def scored(self, hidden: Tensor) -> Scored:
        with self._model.tp.ledger.paused():
            parts = [self._score(self._model.logits(rows)) for rows in hidden.split(ROWS)]
        ids, probs, margins = (torch.cat(column).cpu() for column in zip(*parts, strict=True))
        return Scored(ids, probs, margins)

    def compare(self, name: str, run: Callable[[], tuple[Tensor, Tensor]], expected: Scored, length: int) -> None:
        """Compares a graph with its step. ``run`` launches the graph and returns the tokens of all rows and their
        probabilities, on the host; ``length`` is the rows of a block. GraphError if they differ, here or on another
        rank."""
        bounds = EXACT if self._model.head.dtype == torch.float32 else ROUNDED
        fault = fault_of(*self._timed(run), expected, length, bounds)
        if not self._compiler.on_every_rank(fault is None):
            found = fault or "see the messages of the other ranks"
            mode = self._compiler.mode
            raise GraphError(
                f"bucket {name}: its graph does not compute what its step computes op by op ({found}); this is a fault "
                f"of the device, of its software or of graph mode {mode}: please report it, and try graph_mode eager"
            )
        logger.info("bucket %s computes what its step does (%.1f s of checks so far)", name, self._seconds)

    def _timed(self, run: Callable[[], _T]) -> _T:
        begin = time.perf_counter()
        found = run()
        self._seconds += time.perf_counter() - begin
        return found


def fault_of(
    ids: Tensor, probs: Tensor, expected: Scored, length: int, bounds: tuple[float, float] = ROUNDED
) -> str | None:
    """In what the predictions of rows differ; None if rounding explains it. Another token counts only if it is no
    near-tie, i.e. if the second best one was clearly less probable. ``length``: rows of a block; ``bounds``: for half
    of a block's rows, and for all rows."""
    ids, probs = ids.flatten(), probs.flatten()
    difference = (probs / expected.probs).log().abs()
    difference = difference.masked_fill(probs.isnan() & expected.probs.isnan(), 0)
    is_same = ids == expected.ids
    lead = expected.probs.log() - (expected.probs - expected.confidences).clamp_min(0).log()
    near, far = (~((difference <= bound) & (is_same | (lead <= 2 * bound))) for bound in bounds)
    bad_blocks = near.view(-1, length).float().mean(1) > 0.5
    wrong = far | (near & bad_blocks.repeat_interleave(length))
    if not wrong.any():
        return None
    row = int(wrong.nonzero()[0])
    return (
        f"{int(wrong.sum())} of {len(ids)} rows differ, row {row} has token {int(ids[row])} with probability "
        f"{float(probs[row]):.2g} and not {int(expected.ids[row])} with {float(expected.probs[row]):.2g}"
    )
