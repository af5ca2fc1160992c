"""A hook around the parts of a step, for benchmarks: the time and the work of each part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

Probe = Callable[[str, Any], AbstractContextManager[object]]
"""``with probe(part, work):`` encloses every run of a part. The parts and their work:

- "forward": the model's forward pass; ``ForwardInputs``.
- "score": logits and scores of some positions; (number of positions, ``Scoring``).
- "exchange": the gather of the branches' predictions; the ``SequencePlan`` of each sequence.
- "inputs": writing the inputs of a compiled step; its ``Bucket``.
- "absorb": taking in what a compiled step did to one sequence; its ``Bucket``.
"""


def no_probe(part: str, work: object) -> AbstractContextManager[object]:
    return nullcontext()


@dataclass
class PartTimes:
    """A probe that counts calls and seconds by part. By default seconds are CPU time of this process."""

    clock: Callable[[], float] = time.process_time
    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def __call__(self, part: str, work: object) -> Iterator[None]:
        start = self.clock()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + self.clock() - start
            self.calls[part] = self.calls.get(part, 0) + 1
