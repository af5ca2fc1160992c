"""Decodings under a grammar, over predictions drawn at random: answers keep to it, passes end, streams only grow."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from lopa_ascend.config import DecodingParams
from lopa_ascend.config.families import FAMILIES
from lopa_ascend.decode import begin
from lopa_ascend.decode.constraint import Constraint
from lopa_ascend.decode.strategy import Strategy
from lopa_ascend.text.grammars import Grammars
from lopa_ascend.types import DREAM, RowPlan, RowResult, StepRecord
from tests.grammar_samples import Form, check, forms
from tests.tiers import slow_but
from tests.tiny import tiny_tokenizer

PROMPT = (1, 2, 3, 4, 5)
MASK, END = tiny_tokenizer().special_ids[-1], tiny_tokenizer().special_ids[0]
LIKELY = tiny_tokenizer().encode('0123456789aeit"{}[],: truefalsn.-')
DECODINGS: dict[str, dict[str, Any]] = {
    "d2f": {"decoding": "d2f"},
    "d2f, full": {"decoding": "d2f", "window_attention": "full", "tau_add": 0.0, "tau_act": 0.5},
    "denoising": {"decoding": "d2f", "denoising_steps": 3, "max_active_blocks": 1},
    "lopa": {"num_branches": 7},
    "exact": {"num_branches": 7, "branch_acceptance": "exact", "lookahead_depth": 3},
    "verified": {"num_branches": 7, "branch_acceptance": "verified", "lookahead_depth": 3},
    "parallel": {"decoding": "parallel", "acceptance": "factor"},
    "fast_dllm": {"decoding": "fast_dllm"},
    "lopa, parallel": {"base": "parallel"},
    "lopa, fast_dllm": {"base": "fast_dllm", "block_cache": "dual"},
    "fast_dllm_v2": {"decoding": "fast_dllm_v2", "sub_block_size": 4},
    "lopa, fast_dllm_v2": {"base": "fast_dllm_v2", "sub_block_size": 4},
    "sdar dynamic": {"decoding": "d2f", "tau_add": 1.0, "tau_conf": 0.85, "block_size": 4},
    "sdar sequential": {"decoding": "d2f", "tau_add": 1.0, "acceptance": "sequential", "block_size": 4},
    "sdar, exact": {"num_branches": 3, "branch_acceptance": "exact", "block_size": 4},
}
FORMS = forms(num_schemas=300, num_regexes=100)


@cache
def grammars() -> Grammars:
    return Grammars(tiny_tokenizer())


def start(form: Form, **options: Any) -> Strategy:
    params = DecodingParams(**{"max_new_tokens": 512, "block_size": 16, **options}, structured_outputs=form)
    assert params.structured_outputs is not None
    family = "sdar" if params.block_size == 4 else "Fast_dLLM_Qwen"
    is_dream = params.block_size != 4 and "fast_dllm_v2" not in (params.decoding, params.base)
    properties = DREAM if is_dream else FAMILIES[family].properties
    constraint = Constraint(grammars().matcher(params.structured_outputs), [END])
    return begin(PROMPT, params, MASK, frozenset([END]), properties=properties, constraint=constraint)


def predicted(strategy: Strategy, row: RowPlan, seed: str) -> RowResult:
    """As a model that knows what JSON looks like and nothing more: what is first is among what fits, and by preference
    ends something. Equal rows get equal predictions, and other ones often do."""
    rng = random.Random(f"{seed} {row.tokens}")
    usual = [random.Random(f"{seed} {position}") for position in row.masked]
    draws = [draw if rng.random() < 0.8 else rng for draw in usual]
    tokens = [draw.choice(LIKELY) for draw in draws]
    if row.masked:
        allowed = strategy.allowed(row)
        fitting = [token for token in range(allowed.bit_length()) if allowed >> token & 1]
        ending = [token for token in fitting if token in (END, *tiny_tokenizer().encode('"}],'))]
        if tokens[0] not in fitting or draws[0].random() < 0.5:
            tokens[0] = draws[0].choice(ending if ending and rng.random() < 0.5 else fitting)
    probs = tuple(draw.random() for draw in draws)
    return RowResult(tuple(tokens), probs, probs)


def passes(form: Form, seed: str, **options: Any) -> Iterator[tuple[Strategy, StepRecord]]:
    strategy = start(form, **options)
    while (plan := strategy.plan()) is not None:
        results = [predicted(strategy, row, seed) for row in plan.rows]
        yield strategy, strategy.absorb(plan, results, 0, 0)


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
        for strategy, record in passes(form, f"{name} {number}", **DECODINGS[name]):
            replayed(canvas, record)
            anchor = enumerate(strategy.anchor.tokens, len(PROMPT))
            assert canvas == {position: token for position, token in anchor if token != MASK}
            final = strategy.final_tokens()
            assert final[: len(before)] == before, "the text only grows"
            before = final
        assert strategy.num_forwards <= strategy.params.max_new_tokens
        if strategy.end_reached() is None:
            cut += 1
        else:
            check(form, tiny_tokenizer().decode(before))
    assert cut <= 0.02 * len(FORMS[part::20])


@pytest.mark.parametrize("options", [{"num_branches": 7}, {"num_branches": 4, "lookahead_depth": 4, "tau_add": 0.5}])
@pytest.mark.parametrize("part", slow_but(range(10), [0]))
def test_exact_is_the_constrained_d2f(part: int, options: dict[str, Any]):
    saved = 0
    for form in FORMS[part::10]:
        alone = list(passes(form, "", decoding="d2f", tau_add=options.get("tau_add", 0.1)))
        branches = list(passes(form, "", branch_acceptance="exact", **options))
        assert branches[-1][0].final_tokens() == alone[-1][0].final_tokens(), form
        assert len(branches) <= len(alone)
        saved += len(alone) - len(branches)
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
    *_, (strategy, _) = passes(form, "", decoding="d2f", block_size=8)
    check(form, tiny_tokenizer().decode(strategy.final_tokens()))
    assert len(strategy.final_tokens()) > 100
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
    assert strategy.final_tokens() == [a, a]
    record = step({})
    assert [fill.token for fill in record.forced] == [x]


def test_an_end_is_allowed_where_the_grammar_is_complete():
    strategy = start({"regex": "a{2,3}"}, decoding="d2f")
    a = tiny_tokenizer().encode("a")[0]
    constraint = strategy.constraint
    assert constraint is not None
    assert not constraint.allowed([a]) >> END & 1
    assert constraint.allowed([a, a]) >> END & 1
    assert constraint.forced([a, a]) == []
    assert constraint.forced([a, a, a]) == [END]
    assert constraint.admitted([a, END, a]) == 1
    assert constraint.admitted([a, a, END, a]) == 4
    for special in tiny_tokenizer().special_ids[1:]:
        assert not any(constraint.allowed(beginning) >> special & 1 for beginning in ([], [a], [a, a]))
