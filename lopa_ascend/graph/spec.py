"""Tensors of declared dtype and shape, one after the other in one piece of memory.

A group is a NamedTuple whose fields carry their declarations, as ``Annotated[Tensor, int32("sequences")]``. Dimensions
have the names of a bucket's sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple, Protocol, get_type_hints

import torch
from torch import Tensor


class Sizes(Protocol):
    def shape(self, dims: str) -> tuple[int, ...]:
        """Sizes of named dimensions, e.g. "sequences cells"."""
        ...


class Spec(NamedTuple):
    dims: str
    dtype: torch.dtype


def int32(dims: str) -> Spec:
    return Spec(dims, torch.int32)


def float32(dims: str) -> Spec:
    return Spec(dims, torch.float32)


def boolean(dims: str) -> Spec:
    return Spec(dims, torch.bool)


@cache
def specs(group: type) -> dict[str, Spec]:
    hints = get_type_hints(group, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


def num_elements(group: type, bucket: Sizes) -> int:
    return sum(math.prod(bucket.shape(spec.dims)) for spec in specs(group).values())


def views(memory: Tensor, declared: Iterable[Spec], bucket: Sizes) -> list[Tensor]:
    """The declared tensors, of 32 bits an element, one after the other in ``memory`` int32."""
    found = []
    for spec in declared:
        shape = bucket.shape(spec.dims)
        size = math.prod(shape)
        found.append(memory[:size].view(shape).view(spec.dtype))
        memory = memory[size:]
    return found
