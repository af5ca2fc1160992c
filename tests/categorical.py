"""A tiny Dream whose every token has one known distribution, and a chi-square test against it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lopa_ascend import DecodingParams
from tests.tiny import write_dream, write_weights

PROBABILITIES = (0.3, 0.2, 0.15, 0.12, 0.1, 0.07, 0.04, 0.02)
"""Of the token ids from 10 on. All other ids together have less than one in ten million."""
FIRST_ID = 10
SAMPLED_FIELDS: dict[str, Any] = {
    "temperature": 1.0,
    "max_new_tokens": 4,
    "ignore_eos": True,
    "decoding": "d2f",
    "tau_conf": 0.0,
}
"""With tau_conf 0 every position is filled by its first draw. Above it, probable draws are filled first, and positions
with others draw again: then tokens do not follow the model's distribution."""
SAMPLED = DecodingParams(**SAMPLED_FIELDS)
CRITICAL = (None, 10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32)
"""By degrees of freedom: the value of chi-square that one sample in a thousand exceeds."""


def write_categorical(folder: Path, vocab_size: int) -> Path:
    """Writes a model whose logits are the logarithms of ``PROBABILITIES``, whatever comes before."""
    import torch
    from safetensors.torch import load_file

    write_dream(folder, vocab_size=vocab_size, layers=1)
    weights = load_file(folder / "model.safetensors")
    hidden = weights["model.norm.weight"].shape[0]
    # Every hidden state is all ones: nothing is added to the embedding, and its norm is 1.
    weights["model.embed_tokens.weight"].fill_(1.0)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"model.layers.0.{name}.weight"].zero_()
    weights["model.norm.weight"].fill_(1.0)
    logits = torch.full((vocab_size,), -24.0)
    logits[FIRST_ID : FIRST_ID + len(PROBABILITIES)] = torch.tensor(PROBABILITIES).log()
    weights["lm_head.weight"] = (logits[:, None] / hidden).expand(-1, hidden).contiguous()
    write_weights(folder, weights)
    return folder


def assert_follows_the_distribution(tokens: Sequence[int], kept: int = len(PROBABILITIES)) -> None:
    """Chi-square of the tokens against the ``kept`` most probable ones, at one in a thousand."""
    probabilities = PROBABILITIES[:kept]
    counts = Counter(tokens)
    assert set(counts) == set(range(FIRST_ID, FIRST_ID + kept))
    expected = [len(tokens) * p / sum(probabilities) for p in probabilities]
    assert min(expected) >= 5, "too few tokens for a chi-square test"
    seen = [counts[FIRST_ID + index] for index in range(kept)]
    statistic = sum((s - e) ** 2 / e for s, e in zip(seen, expected, strict=True))
    critical = CRITICAL[kept - 1]
    assert critical is not None
    assert statistic < critical, f"chi-square {statistic:.1f} of {counts} against {critical}"
