"""Decodings under a grammar, over predictions drawn at random: answers keep to it, passes end, streams only grow."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from lopa_ascend.decode.strategy import Strategy
from lopa_ascend.types import RowResult, StepRecord
from tests import drafting
from tests.answers import final_tokens
from tests.grammar_passes import DECODINGS, PROMPT, Passes
from tests.grammar_samples import Form, check, forms
from tests.tiers import slow_but
from tests.tiny import tiny_tokenizer

MASK, END = tiny_tokenizer().special_ids[-1], tiny_tokenizer().special_ids[0]
FORMS = forms(num_schemas=300, num_regexes=100)


@cache
def tiny() -> Passes:
    return Passes(tiny_tokenizer(), [END])


def start(form: Form, **options: Any) -> Strategy:
    return tiny().start(form, **options)


def replayed(canvas: dict[int, int], record: StepRecord) -> None:
    """Does to a canvas, tokens by position, what a record says."""
    canvas |= {fill.position: fill.token for fill in record.branches[record.winner].own_fills}
    for position in record.remasked:
        del canvas[position]
    for fill in (*record.fills, *record.forced):
        assert fill.position not in canvas
        canvas[fill.position] = fill.token


@pytest.mark.parametrize("name", DECODINGS)
@pytest.mark.parametrize("part", slow_but(range(20), [0]))
def test_answers_keep_to_the_grammar(name: str, part: int):
    cut = 0
    for number, form in enumerate(FORMS[part::20]):
        canvas: dict[int, int] = {}
        before: list[int] = []
        for strategy, record in tiny().run(form, f"{name} {number}", **DECODINGS[name]):
            replayed(canvas, record)
            anchor = enumerate(strategy.anchor.tokens, len(PROMPT))
            assert canvas == {position: token for position, token in anchor if token != MASK}
            final = final_tokens(strategy)
            assert final[: len(before)] == before, "the text only grows"
            before = final
        passes = 2 if strategy.params.decoding == "s2d2" else 1  # of a token
        assert strategy.num_forwards <= strategy.params.max_new_tokens * passes
        if strategy.final()[1] is None:
            cut += 1
        else:
            check(form, tiny_tokenizer().decode(before))
    assert cut <= 0.02 * len(FORMS[part::20])


@pytest.mark.parametrize(
    "options",
    [
        {"num_branches": 7},
        {"num_branches": 4, "lookahead_depth": 4, "tau_add": 0.5},
        {"num_branches": 4, "lookahead_depth": 3, "base": "causal_blocks"},
    ],
)
@pytest.mark.parametrize("part", slow_but(range(10), [0]))
def test_exact_is_the_constrained_base(part: int, options: dict[str, Any]):
    saved, usual = 0, {name: options[name] for name in ("tau_add",) if name in options}
    for form in FORMS[part::10]:
        alone = list(tiny().run(form, "", decoding=options.get("base", "d2f"), **usual))
        branches = list(tiny().run(form, "", branch_acceptance="exact", **options))
        assert final_tokens(branches[-1][0]) == final_tokens(alone[-1][0]), form
        assert len(branches) <= len(alone)
        saved += len(alone) - len(branches)
    assert saved > 0


@pytest.mark.parametrize("part", slow_but(range(10), [0]))
def test_checked_drafts_are_the_constrained_tokens_one_by_one(part: int):
    saved = 0
    for form in FORMS[part::10]:
        with drafting.registered():
            runs = [list(tiny().run(form, "", decoding=name, block_size=4)) for name in ("undrafted", "misled", "s2d2")]
        plain, misled, drafted = (final_tokens(passes[-1][0]) for passes in runs)
        assert plain == misled == drafted, form
        saved += len(runs[0]) - len(runs[2])
    assert saved > 0


def test_forced_spans_open_blocks_and_need_no_pass():
    names = [f"a_long_name_of_a_field_{number}" for number in range(6)]
    form = {
        "json": {
            "type": "object",
            "properties": dict.fromkeys(names, {"type": "boolean"}),
            "required": names,
            "additionalProperties": False,
        }
    }
    *_, (strategy, _) = tiny().run(form, "", decoding="d2f", block_size=8)
    check(form, tiny_tokenizer().decode(final_tokens(strategy)))
    assert len(final_tokens(strategy)) > 100
    assert strategy.num_forwards == 7, "the first pass, and one for each value"


def test_what_does_not_fit_is_masked_again():
    strategy = start({"regex": "[ab]{3}x[ab]{10}"}, decoding="d2f", block_size=8)
    a, x = tiny_tokenizer().encode("a")[0], tiny_tokenizer().encode("x")[0]

    def step(tokens: dict[int, int]) -> StepRecord:
        plan = strategy.plan()
        assert plan is not None
        [row] = plan.rows
        values = tuple(tokens.get(position - len(PROMPT), a) for position in row.masked)
        probs = tuple(0.99 if position - len(PROMPT) in tokens else 0.1 for position in row.masked)
        return strategy.absorb(plan, [RowResult(values, probs, probs)], 0, 0)

    step({2: x, 6: END})  # neither fits where it stands; the first position is filled all the same
    assert strategy.anchor.tokens == (a, MASK, x, MASK, MASK, MASK, END, MASK)
    assert strategy.anchor.eos
    record = step({})
    assert strategy.anchor.tokens[:8] == (a, a, *[MASK] * 6)
    assert not strategy.anchor.eos
    assert record.remasked == (len(PROMPT) + 2, len(PROMPT) + 6)
    assert final_tokens(strategy) == [a, a]
    record = step({})
    assert [fill.token for fill in record.forced] == [x]


def test_an_end_is_allowed_where_the_grammar_is_complete():
    constraint = tiny().constraint({"regex": "a{2,3}"})
    a = tiny_tokenizer().encode("a")[0]
    assert not constraint.allowed([a]) >> END & 1
    assert constraint.allowed([a, a]) >> END & 1
    assert constraint.forced([a, a]) == []
    assert constraint.forced([a, a, a]) == [END]
    assert constraint.admitted([a, END, a]) == 1
    assert constraint.admitted([a, a, END, a]) == 4
    for special in tiny_tokenizer().special_ids[1:]:
        assert not any(constraint.allowed(beginning) >> special & 1 for beginning in ([], [a], [a, a]))
