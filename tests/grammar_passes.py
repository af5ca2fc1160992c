"""Decodes under a grammar, over predictions that are drawn at random, with any tokenizer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from lopa_ascend.config import DecodingParams
from lopa_ascend.decode import begin
from lopa_ascend.decode.constraint import Constraint
from lopa_ascend.decode.strategy import SequenceStart, Strategy
from lopa_ascend.families import FAMILIES
from lopa_ascend.text.grammars import Grammars
from lopa_ascend.text.tokenizer import Tokenizer
from lopa_ascend.types import DREAM, RowPlan, RowResult, StepRecord
from tests.grammar_samples import Form

PROMPT = (1, 2, 3, 4, 5)
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
    "ar": {"decoding": "ar"},
    "causal_blocks": {"decoding": "causal_blocks", "sub_block_size": 4, "tau_conf": 0.7},
    "lopa, causal_blocks": {"base": "causal_blocks", "num_branches": 7, "tau_conf": 0.7},
    "exact, causal_blocks": {
        "base": "causal_blocks",
        "num_branches": 7,
        "branch_acceptance": "exact",
        "lookahead_depth": 3,
    },
    "s2d2": {"decoding": "s2d2", "block_size": 4},
    "s2d2, score": {"decoding": "s2d2", "block_size": 4, "routing": "score", "routing_cost": 2.0},
    "s2d2, fast_dllm_v2": {"decoding": "s2d2", "base": "fast_dllm_v2", "sub_block_size": 4},
}
FAMILY_OF = dict.fromkeys(("ar", "causal_blocks"), "nemotron_labs_diffusion") | {"fast_dllm_v2": "Fast_dLLM_Qwen"}
"""By decoding."""


class Rounds(Constraint):
    """Fails instead of going on for ever."""

    left = 20_000

    def forced(self, beginning: Sequence[int]) -> list[int]:
        self.left -= 1
        assert self.left, "rounds without end"
        return super().forced(beginning)


class Passes:
    """Answers of a model that knows what JSON looks like and nothing more.

    Args:
        tokenizer: its last special token is the mask.
        ends: token ids that end an answer.
        others: further tokens that the model likes to predict; never the mask.
    """

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int], others: Sequence[int] = ()):
        self.tokenizer, self.ends, self.mask = tokenizer, ends, tokenizer.special_ids[-1]
        self.grammars = Grammars(tokenizer)
        self._likely = [
            *tokenizer.encode('0123456789aeit"{}[],: truefalsn.-'),
            *(token for token in others if token != self.mask),
        ]
        self._ending = {*ends, *tokenizer.encode('"}],')}

    def start(self, form: Form, **options: Any) -> Strategy:
        params = DecodingParams(**{"max_new_tokens": 512, "block_size": 16, **options}, structured_outputs=form)
        family = FAMILY_OF.get(params.strategy.base, "sdar" if params.block_size == 4 else None)
        properties = DREAM if family is None else FAMILIES[family].properties
        ends, constraint = frozenset(self.ends), self.constraint(form)
        return begin(SequenceStart(PROMPT, params, self.mask, ends, properties=properties, constraint=constraint))

    def constraint(self, form: Form) -> Constraint:
        grammar = DecodingParams(structured_outputs=form).structured_outputs
        assert grammar is not None
        return Rounds(self.grammars.matcher(grammar, self.ends), self.ends)

    def predicted(self, strategy: Strategy, row: RowPlan, seed: str) -> RowResult:
        """What is first is among what fits, and by preference ends something. Equal rows get equal predictions, and
        other ones often do."""
        rng = random.Random(f"{seed} {row.start} {row.tokens}")
        usual = [random.Random(f"{seed} {position}") for position in row.masked]
        draws = [draw if rng.random() < 0.8 else rng for draw in usual]
        tokens = [draw.choice(self._likely) for draw in draws]
        if row.masked:
            fitting = members(strategy.grammar.allowed(strategy.anchor, row))
            ending = [token for token in fitting if token in self._ending]
            if tokens[0] not in fitting or draws[0].random() < 0.5:
                tokens[0] = draws[0].choice(ending if ending and rng.random() < 0.5 else fitting)
        probs = tuple(draw.random() for draw in draws)
        return RowResult(tuple(tokens), probs, probs)

    def run(self, form: Form, seed: str, **options: Any) -> Iterator[tuple[Strategy, StepRecord]]:
        strategy = self.start(form, **options)
        while (plan := strategy.plan()) is not None:
            results = [self.predicted(strategy, row, seed) for row in plan.rows]
            yield strategy, strategy.absorb(plan, results, 0, 0)


def members(tokens: int) -> list[int]:
    """The token ids in a set, ascending."""
    return [token for token, bit in enumerate(reversed(f"{tokens:b}")) if bit == "1"]
