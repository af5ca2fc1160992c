"""What may not be chosen at each position: filters one after the other, which give way to a grammar."""

from __future__ import annotations

from collections.abc import Sequence as List

import pytest
import torch

from lopa_ascend import DecodingParams
from lopa_ascend.core import Request, Sequence
from lopa_ascend.decode import begin
from lopa_ascend.decode.constraint import Constraint
from lopa_ascend.decode.filters import BadWords, EarlyEnds, Filter
from lopa_ascend.decode.strategy import SequenceStart
from lopa_ascend.kv.pages import PAGE_SIZE, PageAllocator, PageTables
from lopa_ascend.parallel.placement import Placement
from lopa_ascend.runner.bans import bans_for
from lopa_ascend.runner.batch import Part, build_batch
from lopa_ascend.score.shards import PerRow
from lopa_ascend.types import GrammarError, RowPlan, Scoring, SequencePlan

MASK, END, TOKENS, CPU = 30, 29, 31, torch.device("cpu")
PROMPT = (1, 2, 3)


class Fixed:
    """A matcher that allows the same tokens everywhere; a text may end anywhere if these hold the end."""

    is_over = False

    def __init__(self, tokens: int):
        self.tokens, self.is_complete = tokens, bool(tokens >> END & 1)

    def allowed(self) -> int:
        return self.tokens

    def accept(self, tokens: List[int]) -> int:
        return len(tokens)

    def roll_back(self, count: int) -> None:
        pass

    def forced(self) -> List[int]:
        return []

    @property
    def takes_any(self) -> bool:
        return False

    def ahead(self) -> List[tuple[int, int]]:
        return []


class Evens:
    """A further filter: bans even ids at even places."""

    keeps_share = True

    def banned(self, answer: List[int], first: int) -> list[frozenset[int]]:
        return [frozenset(() if place % 2 else range(0, TOKENS, 2)) for place in range(first, len(answer))]


def sequence(filters: tuple[Filter, ...] = (), allowed: int | None = None) -> tuple[Sequence, Part]:
    """One that predicts the places 1 to 3 of its answer, in the anchor and in a lookahead branch that has filled place
    1 with token 5; and where it lies in a batch."""
    params = DecodingParams(decoding="d2f", block_size=4, max_new_tokens=4)
    constraint = None if allowed is None else Constraint(Fixed(allowed), [END])
    strategy = begin(SequenceStart(PROMPT, params, MASK, frozenset([END]), constraint=constraint))
    known = (*PROMPT, 4)
    rows = (
        RowPlan(0, (*known, 5, MASK, MASK), 3, (3, 7), (5, 6)),
        RowPlan(0, (*known, MASK, MASK, MASK), 0, (3, 7), (4, 5, 6)),
    )
    plan = SequencePlan(0, 3, rows, 2, winner_commits=False, prefix_length=3)
    tables = PageTables(PageAllocator(2), 2)
    for slot in range(2):
        tables.grow(slot, PAGE_SIZE)
    share = Placement().share(plan)
    request = Request("one", PROMPT, params)
    (part,) = build_batch([(share, tables)], None, 0).parts
    return Sequence(request, strategy, Scoring("max_prob", MASK, TOKENS), tables, filters=filters), part


def by_place(part: Part, per_row: PerRow) -> dict[tuple[int, int], list[int]]:
    """By branch and place in the answer: what the row's tensor holds."""
    branches = [part.share.branches[row] for row in part.predicted_rows]
    places = zip(branches, (part.positions - len(PROMPT)).tolist(), strict=True)
    return {
        place: sorted(per_row.tensors[number].tolist())
        for place, number in zip(places, per_row.of_row, strict=True)
        if number >= 0
    }


def test_what_several_filters_ban_is_banned() -> None:
    given, part = sequence((BadWords([[5, 6]], MASK), EarlyEnds([END, 28], 2), Evens()))
    bans = bans_for(given, part, CPU)
    assert bans is not None
    evens = list(range(0, TOKENS, 2))
    assert by_place(part, bans.sets) == {}
    assert by_place(part, bans.lists) == {
        (0, 2): sorted([6, *evens]),
        (0, 3): [6],
        (1, 1): [28, END],
        (1, 2): sorted([6, *evens]),
        (1, 3): [6],
    }


@pytest.mark.parametrize("filters", [(), (EarlyEnds([END], 1),), (BadWords([[7, 8]], MASK),)])
def test_where_nothing_is_banned_there_are_no_bans(filters: tuple[Filter, ...]) -> None:
    given, part = sequence(filters)
    assert (bans_for(given, part, CPU) is None) == (not filters or isinstance(filters[0], EarlyEnds))


@pytest.mark.parametrize(("allowed", "gives_way"), [((6, END), True), ((6, 9), False)])
def test_a_grammar_speaks_of_the_first_masked_position_of_each_branch_and_filters_may_give_way_there(
    allowed: tuple[int, ...], gives_way: bool
) -> None:
    filters = BadWords([[6]], MASK, keeps_share=False), EarlyEnds([END], 4)
    given, part = sequence(filters, sum(1 << token for token in allowed))
    bans = bans_for(given, part, CPU)
    assert bans is not None
    first, others = [(0, 2), (1, 1)], [(0, 3), (1, 2), (1, 3)]
    excluded = PerRow(tuple(tensor.nonzero()[:, 0] for tensor in bans.sets.tensors), bans.sets.of_row)
    left = allowed if gives_way else (9,)
    assert by_place(part, excluded) == {
        **dict.fromkeys(first, [token for token in range(TOKENS) if token not in left]),
        **dict.fromkeys(others, [6]),
    }
    assert by_place(part, bans.lists) == dict.fromkeys(others if gives_way else first + others, [END])


def test_a_grammar_without_a_way_on_is_told_to_every_group() -> None:
    given, part = sequence(allowed=0)
    for share in (part.share, Placement(3, 2).share(part.share.plan)):
        with pytest.raises(GrammarError, match="no token fits"):
            bans_for(given, Part(share), CPU)
    assert given.error is None
