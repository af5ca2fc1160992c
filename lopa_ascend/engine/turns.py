"""Prefill and decoding steps take turns, so that long prompts do not stall requests that decode or are short.

A prompt that attends to itself in both directions cannot be computed in pieces. Three rules bound how long others wait
for it:

- A prefill step computes at most ``MAX_PREFILL_TOKENS`` tokens, or one prompt that is longer.
- If any request decodes, one decoding step follows for each ``TOKENS_PER_DECODING_STEP`` tokens of the prefill step.
  Between these, prompts of at most ``TOKENS_PER_DECODING_STEP`` tokens together may be computed.
- Shorter prompts go first, but a prompt that was overtaken ``MAX_OVERTAKEN`` times is not overtaken again.

A causal model's prompts are computed in pieces (``Pieces``), each followed by a decoding step if any request decodes. A
piece does half the work of that step, so others usually wait for less than two steps. A token's work is 1 for the
products with the weights, and grows with the positions that it sees.

The rules count tokens and steps, not seconds, so every rank decides the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from lopa_ascend.kv.pages import PAGE_SIZE

MAX_PREFILL_TOKENS = 1024
"""Most tokens of a prefill step, unless one prompt has more. Fewer: running requests wait less for others' prompts, and
prompts take more steps."""
TOKENS_PER_DECODING_STEP = 128
"""Prompt tokens computed for each decoding step while requests decode."""
MAX_OVERTAKEN = 8
"""Prefill steps in which shorter, later prompts may go before a prompt."""


class Turns:
    """Chooses the prompts of each step: at most ``max_tokens`` tokens, unless one prompt has more. ``owed``: prompt
    tokens for which decoding steps are still to come."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.owed = 0
        self._prefilled_last = False
        self._overtaken: Mapping[str, int] = {}
        """By request id: prefill steps in which a later prompt went first."""

    def choose(self, waiting: Mapping[str, int], decoding: bool) -> list[str]:
        """Counts a step and chooses the ids of its prompts; none if it is a decoding step.

        ``waiting``: by request id, in order of arrival, the tokens of a prefill step for a request whose prompt is not
        computed yet: its prompt, and its first block or its whole canvas. ``decoding``: whether any request decodes.
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
        if not waiting or (decoding and self._prefilled_last):
            return []
        in_order = self._in_order(waiting)
        if not self.owed:
            return _fitting(in_order, waiting, self.max_tokens) or in_order[:1]
        # Decoding steps are still owed: short prompts may go between them, and none before an overdue one.
        return _fitting(in_order, waiting, min(self.max_tokens, TOKENS_PER_DECODING_STEP))

    def _in_order(self, waiting: Mapping[str, int]) -> list[str]:
        """Overdue prompts in order of arrival; then the others, shortest first."""
        return sorted(waiting, key=lambda prompt: 0 if self._is_overdue(prompt) else waiting[prompt])

    def _is_overdue(self, prompt: str) -> bool:
        return self._overtaken.get(prompt, 0) >= MAX_OVERTAKEN

    def _count_overtaken(self, waiting: Iterable[str], chosen: Iterable[str]) -> None:
        """Counts the step for prompts that a later one has overtaken."""
        last_chosen = max(index for index, prompt in enumerate(waiting) if prompt in chosen)
        overtaken: dict[str, int] = {}
        for index, prompt in enumerate(waiting):
            if prompt not in chosen:
                times = self._overtaken.get(prompt, 0)
                overtaken[prompt] = times + 1 if index < last_chosen else times
        self._overtaken = overtaken


class Prompt(NamedTuple):
    """The rest of a prompt that is computed in pieces: ``length`` positions from ``start`` on."""

    start: int
    length: int


class Pieces(Turns):
    """Chooses the pieces of a causal model's prompts for each step.

    Args:
        max_tokens: most tokens of a step, if fewer than ``MAX_PREFILL_TOKENS``.
        free_tokens: see ``backend.device.Device``; a step has at least so many, even if they do more work.
        reach: see ``ModelConfig.attention_reach``.
    """

    def __init__(self, max_tokens: int, free_tokens: int, reach: int) -> None:
        super().__init__(min(MAX_PREFILL_TOKENS, max_tokens))
        self.free_tokens, self.reach = free_tokens, reach

    def work(self, start: int, length: int) -> float:
        """The work of ``length`` positions from ``start`` on."""
        return length * (1 + start / self.reach)

    def pieces(self, waiting: Mapping[str, Prompt], decoding: float) -> dict[str, int]:
        """Counts a step and chooses its pieces: positions by request id; none if it is a decoding step. ``waiting`` is
        in order of arrival; ``decoding`` is the work of the next decoding step, 0 if no request decodes."""
        found: dict[str, int] = {}
        if waiting and not (decoding and self._prefilled_last):
            found = self._pieces(waiting, decoding)
            self._count_overtaken(waiting, found)
        self._prefilled_last = bool(found)
        return found

    def _pieces(self, waiting: Mapping[str, Prompt], decoding: float) -> dict[str, int]:
        found: dict[str, int] = {}
        num_tokens, work = self.max_tokens, decoding / 2
        for name in self._in_order({name: prompt.length for name, prompt in waiting.items()}):
            start, length = waiting[name]
            size = min(num_tokens, length)
            if decoding:
                allowed = int(work / self.work(start, 1))
                # A piece within one page reads the positions before it once.
                size = min(size, PAGE_SIZE - start % PAGE_SIZE, allowed if found else max(allowed, self.free_tokens))
            if size <= 0:
                break
            found[name] = size
            num_tokens -= size
            work -= self.work(start, size)
        return found


def _fitting(prompts: list[str], num_tokens: Mapping[str, int], budget: int) -> list[str]:
    """The first prompts whose tokens fit in the budget together."""
    chosen: list[str] = []
    for prompt in prompts:
        budget -= num_tokens[prompt]
        if budget < 0:
            break
        chosen.append(prompt)
    return chosen
