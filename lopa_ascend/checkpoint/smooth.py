"""Moves outliers of activations into weights (SmoothQuant, arXiv 2211.10438), so that int8 loses less.

Each input channel of a linear layer is divided by a factor, and its column of the weight is multiplied by it. To divide
the input, the weight of its source is divided (``Row.source``): a norm, or rows of a linear layer. Dividing rows loses
no precision, because each row has its own scale.

Factors are powers of two, so folding them in rounds nothing: the float model computes the same, bit for bit. Only
float16 has too few exponents: its smallest values lose bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from lopa_ascend.families.table import Tensors, TensorSpec

STRENGTH = 0.5
"""SmoothQuant's alpha: the share of an outlier, as an exponent, that moves into the weights."""
MAX_EXPONENT = 16
"""Factors are from 2**-16 to 2**16."""


def smoothed_weights(tensors: Tensors, modules: Collection[str]) -> dict[str, TensorSpec]:
    """The weights of the int8 linear layers ``modules`` with an input that can be smoothed, by name."""
    return {spec.name: spec for spec in tensors.linears.values() if spec.row.source and spec.module in modules}


def choose_factors(
    stream: Iterable[tuple[str, Tensor]], activations: Mapping[str, Tensor], weights: Mapping[str, TensorSpec]
) -> dict[str, Tensor]:
    """Powers of two, float32 [in], by name of the tensor to divide, e.g. "model.layers.0.input_layernorm.weight".

    Args:
        stream: the whole float model.
        activations: the largest magnitude of each input channel, float32 [in], by our name of a linear layer, e.g.
            "layers.0.qkv".
        weights: of ``smoothed_weights``.

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
    """The power of two nearest to SmoothQuant's factor of each channel; 1 if a channel is always 0. Arguments are the
    largest magnitudes of channels and of columns, float32 [in]."""
    exponents = STRENGTH * activations.log2() - (1 - STRENGTH) * weights.log2()
    exponents = exponents.round().clamp(-MAX_EXPONENT, MAX_EXPONENT)
    return exponents.masked_fill((activations == 0) | (weights == 0), 0).exp2()


def smoothed(
    stream: Iterable[tuple[str, Tensor]], factors: Mapping[str, Tensor], weights: Mapping[str, TensorSpec]
) -> Iterator[tuple[str, Tensor]]:
    """Folds the factors of ``choose_factors`` into whole tensors."""
    for name, tensor in stream:
        if name in weights:  # columns that read what is divided
            tensor = _times(tensor, factors[weights[name].source])
        if name in factors:  # a norm, or rows of a linear layer, that make what is divided
            inverse = 1 / factors[name]
            tensor = _times(tensor, inverse if tensor.dim() == 1 else inverse[:, None])
        yield name, tensor


def _times(tensor: Tensor, powers: Tensor) -> Tensor:
    """A product in the tensor's dtype. Float16 cannot hold some of the powers."""
    return (tensor.float() * powers).to(tensor.dtype)
