"""Compilers that keep what they compile in a directory, and go on without it when it cannot be used."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from lopa_ascend.backend.compiler import Compiler, GraphError, Run, Step
from lopa_ascend.backend.graph_cache import GraphCache, private_files
from lopa_ascend.backend.memory import is_out_of_memory


class CachingCompiler(Compiler):
    """Compiles into a directory, or loads from there what an earlier process compiled.

    Args:
        cache: the directory.
    """

    def __init__(self, cache: GraphCache):
        super().__init__()
        self._cache = cache

    def freeze(self) -> None:
        super().freeze()
        self._cache.seal()

    def _compile(self, step: Step, name: str, tensors: Sequence[Tensor], kv_lengths: list[int]) -> Run:
        num_loaded, num_compilations = self.num_loaded, self.num_compilations
        with private_files():
            try:
                return self._compile_cached(step, name, tensors, kv_lengths)
            except GraphError:
                raise
            # Damaged files may raise anything. If they were not the reason, the second attempt raises the same again.
            except Exception as error:
                if not self._cache.is_kept or is_out_of_memory(error):
                    raise
                self._abandon_cache(error)
        self.num_loaded, self.num_compilations = num_loaded, num_compilations
        return self._compile_cached(step, name, tensors, kv_lengths)

    @abstractmethod
    def _compile_cached(self, step: Step, name: str, tensors: Sequence[Tensor], kv_lengths: list[int]) -> Run:
        """Compiles a bucket into the directory, or loads it from there."""

    def _abandon_cache(self, error: Exception) -> None:
        """Goes on in a temporary directory, because the directory cannot be used."""
        self._cache.abandon(error)
