"""What a strategy has decoded so far."""

from __future__ import annotations

from lopa_ascend.decode.strategy import Strategy


def final_tokens(strategy: Strategy) -> list[int]:
    """The token ids that never change."""
    places, _, _ = strategy.final()
    return [strategy.answer.tokens[place] for place in places]
