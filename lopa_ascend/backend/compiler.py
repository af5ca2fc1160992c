"""What makes one launch of a decode step: the interface of all compilers, and what they share.

A step is a function of device tensors and of the KV lengths of its attention entries. A bucket is one step with tensors
that stay where they are: the host exchanges what is in them, and the step writes into some of them and into the caches
that it closes over. So a compiled step is called with lengths alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor

Step = Callable[[Sequence[Tensor], Sequence[int]], Tensor]
"""``step(tensors, kv_lengths)``. Lengths reach the attention's entries, all of them in order, and nothing else."""
Run = Callable[[Sequence[int]], Tensor]
"""``run(kv_lengths)`` launches the step and waits for nothing. What it returns holds the result until the next launch
of any bucket."""


class GraphError(ValueError):
    """A bucket cannot be compiled, or not any more."""


class Compiler(ABC):
    """Compiles steps, a bucket each, until it is frozen; what is compiled is never compiled again.

    ``num_compilations`` counts the buckets that were compiled, ``num_loaded`` those that a persistent cache had,
    ``num_captures`` the graphs that were captured, ``num_refused`` what was asked for too late. ``memory`` is the bytes
    that captured graphs hold.
    """

    mode: str
    max_buckets: int | None = None

    def __init__(self) -> None:
        self.num_compilations = 0
        self.num_loaded = 0
        self.num_captures = 0
        self.num_refused = 0
        self.memory = 0
        self._frozen = False

    def check_buckets(self, names: Sequence[str]) -> None:
        """Refuses more buckets than this mode can hold.

        Raises:
            GraphError: there are too many.
        """
        most = self.max_buckets
        if most is not None and len(names) > most:
            raise GraphError(
                f"graph mode {self.mode} holds {most} graphs; of {len(names)} buckets these are too many: "
                + ", ".join(names[most:])
                + "; serve fewer sequences at a time, smaller windows or shorter sequences"
            )

    def compile(self, step: Step, name: str, tensors: Sequence[Tensor], kv_lengths: Sequence[int]) -> Run:
        """Compiles the step of the bucket ``name`` for these tensors and this many KV lengths, each at least 2. It is
        launched meanwhile, so it writes what it writes.

        Raises:
            GraphError: the compiler is frozen or full, the device has no room for another graph, or the lengths go
                elsewhere than to attention.
            ValueError: a length is less than 2, which compilers take as a constant.
        """
        if self._frozen:
            self.num_refused += 1
            raise GraphError(f"bucket {name} was not compiled before serving began")
        if self.num_compilations + self.num_loaded == self.max_buckets:
            raise GraphError(f"graph mode {self.mode} holds {self.max_buckets} graphs; bucket {name} would be one more")
        if min(kv_lengths) < 2:
            raise ValueError(f"bucket {name}: a KV length is less than 2")
        return self._compile(step, name, tensors, list(kv_lengths))

    def freeze(self) -> None:
        """From now on compiling is an error."""
        self._frozen = True

    @abstractmethod
    def _compile(self, step: Step, name: str, tensors: Sequence[Tensor], kv_lengths: list[int]) -> Run: ...


class Eager(Compiler):
    """Compiles nothing: every op is a launch of its own."""

    mode = "eager"

    def _compile(self, step: Step, name: str, tensors: Sequence[Tensor], kv_lengths: list[int]) -> Run:
        def run(kv_lengths: Sequence[int]) -> Tensor:
            return step(tensors, kv_lengths)

        return run
