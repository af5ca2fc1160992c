"""A hook around the parts of a step, for benchmarks: the time and the work of each part."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
