"""Prefill steps and decoding steps take turns, so that long prompts do not stall requests that decode or are short.

A prompt that attends to itself in both directions cannot be computed in pieces. Three rules bound how long others wait
for it:

- A prefill step computes at most ``MAX_PREFILL_TOKENS`` tokens, or one prompt that is longer.
- Then come decoding steps, if any request decodes: one for each ``TOKENS_PER_DECODING_STEP`` tokens that the prefill
  step computed. Between these decoding steps, prompts of at most ``TOKENS_PER_DECODING_STEP`` tokens together may be
  computed.
- Shorter prompts go first, but a prompt that was overtaken ``MAX_OVERTAKEN`` times is not overtaken again.

A causal model's prompt is computed in pieces, so that no prefill step of it has more tokens than these rules allow.

The rules count tokens and steps, not seconds, so every rank takes the same decisions.
"""

from __future__ import annotations

from collections.abc import Mapping

MAX_PREFILL_TOKENS = 1024
"""Most tokens of a prefill step, unless a single prompt has more. With fewer, running requests would wait less for the
prompts of others, and prompts would take more steps."""
TOKENS_PER_DECODING_STEP = 128
"""Tokens of prompts that are computed for each decoding step while requests decode."""
MAX_OVERTAKEN = 8
"""Prefill steps in which shorter prompts that came later may go before a prompt."""


class Turns:
    """Chooses the prompts of each step.

    Attributes:
        owed: tokens of prompts for which decoding steps are still to come.

    Args:
        max_tokens: most tokens of a prefill step, unless a single prompt has more.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.owed = 0
        self._prefilled_last = False
        self._overtaken: Mapping[str, int] = {}
        """By request id: prefill steps in which a later prompt went first."""

    def piece(self, *, decoding: bool) -> int:
        """Most tokens of a prompt in one step, if it can be computed in pieces.

        Args:
            decoding: whether any request decodes.
        """
        return min(self.max_tokens, TOKENS_PER_DECODING_STEP) if decoding else self.max_tokens

    def choose(self, waiting: Mapping[str, int], decoding: bool) -> list[str]:
        """Notes that a step is made, and chooses its prompts.

        Args:
            waiting: by request id, in the order of arrival: the tokens that the prefill step computes for a request
                whose prompt is not computed yet. These are its prompt, and its first block or its whole canvas.
            decoding: whether any request decodes.

        Returns:
            Ids of the requests whose prompts the step computes; none if it is a decoding step.
        """
        if not decoding:
            self.owed = 0
        chosen = self._chosen(waiting, decoding)
        self._prefilled_last = bool(chosen)
        if chosen:
            self.owed += sum(waiting[prompt] for prompt in chosen)
            self._count_overtaken(waiting, chosen)
        else:
            self.owed = max(0, self.owed - TOKENS_PER_DECODING_STEP)
        return chosen

    def _chosen(self, waiting: Mapping[str, int], decoding: bool) -> list[str]:
        """The prompts that this step computes; none if it is a decoding step."""
        if not waiting or (decoding and self._prefilled_last):
            return []
        # Overdue prompts in the order of their arrival; then the others, the shortest first.
        in_order = sorted(waiting, key=lambda prompt: 0 if self._is_overdue(prompt) else waiting[prompt])
        if not self.owed:
            return _fitting(in_order, waiting, self.max_tokens) or in_order[:1]
        # Decoding steps are still owed: short prompts may go between them, unless they would overtake an overdue one.
        if self._is_overdue(in_order[0]):
            return []
        return _fitting(in_order, waiting, min(self.max_tokens, TOKENS_PER_DECODING_STEP))

    def _is_overdue(self, prompt: str) -> bool:
        """Whether no other prompt may go before this one any more."""
        return self._overtaken.get(prompt, 0) >= MAX_OVERTAKEN

    def _count_overtaken(self, waiting: Mapping[str, int], chosen: list[str]) -> None:
        """Counts the step for the prompts that were not chosen although a later one was."""
        last_chosen = max(index for index, prompt in enumerate(waiting) if prompt in chosen)
        overtaken: dict[str, int] = {}
        for index, prompt in enumerate(waiting):
            if prompt not in chosen:
                times = self._overtaken.get(prompt, 0)
                overtaken[prompt] = times + 1 if index < last_chosen else times
        self._overtaken = overtaken


def _fitting(prompts: list[str], num_tokens: Mapping[str, int], budget: int) -> list[str]:
    """The first prompts whose tokens together are within the budget."""
    chosen: list[str] = []
    for prompt in prompts:
        budget -= num_tokens[prompt]
        if budget < 0:
            break
        chosen.append(prompt)
    return chosen
