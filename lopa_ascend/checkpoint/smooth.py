"""Moves outliers of activations into weights, as SmoothQuant does, so that int8 loses less.

Each input channel of a linear layer is divided by a factor, and the matching column of the layer's weight is multiplied
by it. To divide the input, the weight of what makes it is divided (`Row.source`): a norm, or rows of a linear layer.
Dividing rows loses no precision, because each row has its own scale.

All factors are powers of two, so folding them in rounds nothing: the float model still computes the same, bit for bit.
Only float16 has too few exponents for that, so that its smallest values lose bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from lopa_ascend.families.table import Tensors, TensorSpec

STRENGTH = 0.5
"""How much of an outlier moves into the weights: the exponent that SmoothQuant calls alpha."""
MAX_EXPONENT = 16
"""Factors are between 2**-MAX_EXPONENT and 2**MAX_EXPONENT."""


def smoothed_weights(tensors: Tensors, modules: Collection[str]) -> dict[str, TensorSpec]:
    """By name, those weights of the int8 linear layers ``modules`` whose input can be smoothed."""
    return {spec.name: spec for spec in tensors.linears.values() if spec.row.source and spec.module in modules}


def choose_factors(
    stream: Iterable[tuple[str, Tensor]], activations: Mapping[str, Tensor], weights: Mapping[str, TensorSpec]
) -> dict[str, Tensor]:
    """The factors of all input channels that are smoothed.

    Args:
        stream: names and tensors of the whole float model.
        activations: by our name of a linear layer, e.g. "layers.0.qkv", the largest magnitude of each of its input
            channels, float32 [in].
        weights: of `smoothed_weights`.

    Returns:
        By name of the tensor that is divided, e.g. "model.layers.0.input_layernorm.weight": powers of two,
        float32 [in].

    Raises:
        ValueError: an activation is not finite.
    """
    largest: dict[str, Tensor] = {}
    for name, tensor in stream:
        if name in weights:
            source, columns = weights[name].source, tensor.abs().amax(0).float()
            largest[source] = torch.maximum(largest[source], columns) if source in largest else columns
    factors: dict[str, Tensor] = {}
    for spec in weights.values():
        ours = spec.ours.removesuffix(".weight")
        if ours in activations and spec.source not in factors:
            if not activations[ours].isfinite().all():
                raise ValueError(f"{ours}: an input is not finite")
            factors[spec.source] = powers_of_two(activations[ours], largest[spec.source])
    return factors


def powers_of_two(activations: Tensor, weights: Tensor) -> Tensor:
    """The power of two nearest to SmoothQuant's factor of each channel; 1 where a channel is always 0.

    Args:
        activations: the largest magnitude of each channel, float32 [in].
        weights: the largest magnitude of each column, float32 [in].
    """
    exponents = STRENGTH * activations.log2() - (1 - STRENGTH) * weights.log2()
    exponents = exponents.round().clamp(-MAX_EXPONENT, MAX_EXPONENT)
    return exponents.masked_fill((activations == 0) | (weights == 0), 0).exp2()


def smoothed(
    stream: Iterable[tuple[str, Tensor]], factors: Mapping[str, Tensor], weights: Mapping[str, TensorSpec]
) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors with the factors of `choose_factors` folded into them."""
    for name, tensor in stream:
        if name in weights:  # columns that read what is divided
            tensor = _times(tensor, factors[weights[name].source])
        if name in factors:  # a norm, or rows of a linear layer, that make what is divided
            inverse = 1 / factors[name]
            tensor = _times(tensor, inverse if tensor.dim() == 1 else inverse[:, None])
        yield name, tensor


def _times(tensor: Tensor, powers: Tensor) -> Tensor:
    """A tensor times powers of two, some of which float16 cannot hold, in the dtype of the tensor."""
    return (tensor.float() * powers).to(tensor.dtype)
