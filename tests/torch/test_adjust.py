"""Penalties and biases, against the formulas token by token."""

from __future__ import annotations

import pytest
import torch

from lopa_ascend.config import DecodingParams
from lopa_ascend.score.adjust import adjustment_for

VOCAB = 20
PROMPT, ANSWER = [1, 2, 2, 3], [3, 4, 4, 4, 5]
PARAMS = [
    DecodingParams(presence_penalty=0.7),
    DecodingParams(frequency_penalty=-0.4),
    DecodingParams(repetition_penalty=1.5),
    DecodingParams(logit_bias=((4, 3.5), (7, -100), (19, 100))),
    DecodingParams(presence_penalty=-1, frequency_penalty=0.3, repetition_penalty=0.5, logit_bias=((4, 2), (9, 1))),
]


def expected(x: float, token: int, params: DecodingParams) -> float:
    if token in PROMPT + ANSWER:
        x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
    count = ANSWER.count(token)
    x -= params.presence_penalty * (count > 0) + params.frequency_penalty * count
    return x + dict(params.logit_bias).get(token, 0.0)


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("cuts", [(0, VOCAB), (0, 4, 5, 13, VOCAB)])
def test_every_shard_adjusts_its_own_tokens(params: DecodingParams, cuts: tuple[int, ...]) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    adjustment = adjustment_for(params, PROMPT, [ANSWER], torch.device("cpu"))
    assert adjustment is not None
    found = torch.cat([adjustment.apply(logits[:, a:b].clone(), a) for a, b in zip(cuts, cuts[1:], strict=False)], 1)
    for row in range(3):
        for token in range(VOCAB):
            assert float(found[row, token]) == pytest.approx(expected(float(logits[row, token]), token, params), 1e-5)


def test_without_penalties_and_biases_there_is_nothing_to_do() -> None:
    assert adjustment_for(DecodingParams(), PROMPT, [ANSWER], torch.device("cpu")) is None
    assert adjustment_for(DecodingParams(presence_penalty=1.0), PROMPT, [[]], torch.device("cpu")) is None


@pytest.mark.parametrize("params", PARAMS)
def test_each_row_counts_what_is_before_it(params: DecodingParams) -> None:
    """To the bit as a pass that has this row alone."""
    logits = torch.randn(len(ANSWER), VOCAB, generator=torch.Generator().manual_seed(1))
    answers = [ANSWER[:number] for number in range(len(ANSWER))]
    whole = adjustment_for(params, PROMPT, answers, torch.device("cpu"))
    assert whole is not None
    together = whole.apply(logits.clone(), 0)
    for number, answer in enumerate(answers):
        alone = adjustment_for(params, PROMPT, [answer], torch.device("cpu"))
        row = logits[number : number + 1].clone()
        assert torch.equal(together[number : number + 1], row if alone is None else alone.apply(row.clone(), 0))
        assert torch.equal(whole.of_rows(torch.tensor([number])).apply(row.clone(), 0), together[number : number + 1])
