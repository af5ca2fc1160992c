"""The interface of the compilers that make one launch of a decode step, and what they have in common.

A step is a function of device tensors and of the KV lengths of its attention entries. A bucket is a step with tensors
that keep their memory: the host writes new inputs into them, and the step writes into some of them and into its caches.
So only the KV lengths are arguments of a compiled step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lopa_ascend.backend.memory import is_out_of_memory

Step = Callable[[Sequence[Tensor], Any], Tensor]
"""``step(tensors, kv_lengths)``. All KV lengths, in order, go to the entries of the attention and to nothing else. They
are integers of the host, or with CUDA graphs a device tensor; see ``Entries``."""
Run = Callable[[Sequence[int]], Tensor]
"""``run(kv_lengths)`` launches the step of a bucket and waits for nothing. The returned tensor holds the result until
the next launch of any bucket."""

MIN_KV_LENGTH = 2
"""Torch's compiler turns the integers 0 and 1 into constants of the graph."""


class GraphError(ValueError):
    """A bucket cannot be compiled, or not any more."""


class Compiler(ABC):
    """Compiles the steps of buckets, each of them once, until it is frozen."""

    mode: str
    """One of ``config.engine.GRAPH_MODES``."""
    max_buckets: int | None = None
    """None: any number."""
    warning: str | None = None
    """What speaks against the mode, with a place for the number of graphs."""
    seconds_to_compile: tuple[float, float] | None = None
    """CPU seconds to compile a bucket: for any model, and for each layer besides. None: not measured."""
    rehearses = False
    """Whether to rehearse all buckets before any is compiled (``rehearse``)."""
    packs: bool = False
    """Whether buckets take so little time that there are packed ones (``graph/buckets.py``)."""
    num_compilations: int
    num_loaded: int
    captured: list[str]
    """Buckets captured as a graph of the device, in order. Ranks replay graphs with collectives of the same captures
    alone."""
    num_refused: int
    """Buckets asked for after ``freeze``."""
    memory: int
    """Bytes of device memory that captured graphs hold."""
    replay_milliseconds: dict[str, float]
    """By bucket, how long a replay took at start; only for buckets that were tried out."""

    def __init__(self) -> None:
        self.on_every_rank: Callable[[bool], bool] = lambda fact: fact
        """Whether a fact holds on every rank. Waits until all ranks have called it."""
        self.while_waiting: Callable[[float], None] = lambda seconds: None
        """See ``Group.while_waiting``."""
        self.num_compilations = 0
        self.num_loaded = 0
        self.captured = []
        self.num_refused = 0
        self.memory = 0
        self.replay_milliseconds = {}
        self._frozen = False

    def check_buckets(self, names: Sequence[str]) -> None:
        """Raises GraphError for more buckets than this mode can hold."""
        most = self.max_buckets
        if most is not None and len(names) > most:
            raise GraphError(
                f"graph mode {self.mode} holds {most} graphs; of {len(names)} buckets these are too many: "
                + ", ".join(names[most:])
                + "; for fewer graphs, lower max_num_seqs, graph_window_blocks or max_model_len"
            )

    def compile(self, step: Step, name: str, tensors: Sequence[Tensor], kv_lengths: Sequence[int]) -> Run:
        """Compiles the step of a bucket. This launches the step, so it writes into ``tensors``, with which it is called
        at every launch. ``kv_lengths``, each at least 2 (ValueError), are for this launch; later ones may differ, but
        not their number.

        Raises:
            GraphError: the compiler is frozen or full, the device has no room for another graph or no memory for the
                step, or KV lengths go elsewhere than to the attention.
        """
        if self._frozen:
            self.num_refused += 1
            raise GraphError(f"bucket {name} was not compiled before serving began")
        if self.num_compilations + self.num_loaded == self.max_buckets:
            raise GraphError(f"graph mode {self.mode} holds {self.max_buckets} graphs; bucket {name} would be one more")
        if min(kv_lengths) < MIN_KV_LENGTH:
            raise ValueError(f"bucket {name}: a KV length is less than {MIN_KV_LENGTH}")
        try:
            return self._compile(step, name, tensors, list(kv_lengths))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise GraphError(
                f"bucket {name}: the device has no memory for its step ({error}); lower kv_cache_memory, max_num_seqs "
                "or graph_window_blocks"
            ) from error

    def rehearse(self, step: Step, name: str, tensors: Sequence[Tensor], kv_lengths: Sequence[int]) -> None:  # noqa: B027
        """Launches the step of a bucket as often as a capture needs, before any bucket is compiled: graphs keep their
        memory, and a launch takes as much beside them."""

    def try_out(self, run: Run, name: str, kv_lengths: Sequence[Sequence[int]]) -> None:  # noqa: B027  # few modes do
        """Launches a compiled step once for each of these KV lengths, if launches may hang, and times the last one.
        Every rank must call it. GraphError if a launch does not end."""

    def launch(self, run: Run, name: str, kv_lengths: Sequence[int]) -> Tensor:
        """Launches a step, compiled or op by op, and waits for it if it may hang. GraphError if it does not end."""
        return run(kv_lengths)

    def replayed(self, launch: Callable[[], Tensor]) -> Tensor:
        """What ``launch`` computes, from the replay of a graph if this mode captures any. Its kernels must have been
        launched before."""
        return launch()

    def freeze(self) -> None:
        self._frozen = True

    def close(self) -> None:  # noqa: B027  # few modes must
        """Destroys captured graphs. NCCL waits for that before a communicator ends, even for graphs that a traceback
        still refers to."""

    @abstractmethod
    def _compile(self, step: Step, name: str, tensors: Sequence[Tensor], kv_lengths: list[int]) -> Run:
        """``compile`` after its checks."""


class Eager(Compiler):
    """Compiles nothing: each op of a step is a launch of its own."""

    mode = "eager"
    packs = True

    def _compile(self, step: Step, name: str, tensors: Sequence[Tensor], kv_lengths: list[int]) -> Run:
        def run(kv_lengths: Sequence[int]) -> Tensor:
            return step(tensors, kv_lengths)

        return run


def dynamic_kv_lengths(num_lengths: int) -> str:
    """torch.compile's option ``dynamic_sources`` for a function with an argument ``kv_lengths``, whose items then
    become inputs of the graph instead of constants."""
    return ",".join(f"L['kv_lengths'][{index}]" for index in range(num_lengths))
