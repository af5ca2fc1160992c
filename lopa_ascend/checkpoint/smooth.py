"""Moves outliers of activations into weights, as SmoothQuant does, so that int8 loses less.

Each input channel of a linear layer is divided by a factor, and the matching column of the layer's weight is multiplied
by it. To divide the input of q, k and v, or of gate and up, the weight of the norm before them is divided. There is no
norm before down_proj, so the rows of up_proj are divided instead. This loses no precision, because each row has its own
scale. The input of o_proj is left as it is: it is an average of values, in which outliers are rare.

All factors are powers of two, so folding them in rounds nothing: the float model still computes the same, bit for bit.
Only float16 has too few exponents for that, so that its smallest values lose bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

STRENGTH = 0.5
"""How much of an outlier moves into the weights: the exponent that SmoothQuant calls alpha."""
MAX_EXPONENT = 16
"""Factors are between 2**-MAX_EXPONENT and 2**MAX_EXPONENT."""


@dataclass(frozen=True)
class Reader:
    """Linear layers that have one input, and what makes that input."""

    source: str
    """The tensor that is divided, by the end of its name in a checkpoint: a norm, or the rows of a linear layer."""
    layers: tuple[str, ...]
    """The ends of the names of the linear layers."""


READERS: Mapping[str, Reader] = {
    "qkv": Reader("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    "gate_up": Reader("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    "down": Reader("mlp.up_proj", ("mlp.down_proj",)),
}
"""The layers whose input can be smoothed, by the last part of our name for them (``checkpoint.stack``)."""


def smoothed_readers(int8: Collection[str]) -> dict[str, Reader]:
    """The entries of READERS that are quantised.

    Args:
        int8: the last parts of the names of the linear layers that are quantised.
    """
    return {
        name: reader
        for name, reader in READERS.items()
        if all(layer.rpartition(".")[2] in int8 for layer in reader.layers)
    }


def choose_factors(
    tensors: Iterable[tuple[str, Tensor]], activations: Mapping[str, Tensor], int8: Collection[str]
) -> dict[str, Tensor]:
    """The factors of all input channels that are smoothed.

    Args:
        tensors: Hugging Face names and tensors of the whole float model.
        activations: by our name of a linear layer, e.g. "layers.0.qkv", the largest magnitude of each of its input
            channels, float32 [in].
        int8: the last parts of the names of the linear layers that are quantised.

    Returns:
        By name of the module whose output is divided, e.g. "model.layers.0.input_layernorm": powers of two,
        float32 [in].

    Raises:
        ValueError: an activation is not finite.
    """
    readers = smoothed_readers(int8)
    weights: dict[str, Tensor] = {}
    for name, tensor in tensors:
        source = source_of(name.removesuffix(".weight"), readers.values()) if name.endswith(".weight") else None
        if source is not None:
            columns = tensor.abs().amax(0).float()
            weights[source] = torch.maximum(weights[source], columns) if source in weights else columns
    factors = {}
    for ours, magnitudes in activations.items():
        prefix, _, kind = ours.rpartition(".")
        if kind in readers:
            if not magnitudes.isfinite().all():
                raise ValueError(f"{ours}: an input is not finite")
            source = f"model.{prefix}.{readers[kind].source}"
            factors[source] = powers_of_two(magnitudes, weights[source])
    return factors


def source_of(module: str, readers: Iterable[Reader]) -> str | None:
    """The name of the module whose output is divided for a linear layer; None if it is not smoothed."""
    for reader in readers:
        for layer in reader.layers:
            if module.endswith(f".{layer}"):
                return module.removesuffix(layer) + reader.source
    return None


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
    tensors: Iterable[tuple[str, Tensor]], factors: Mapping[str, Tensor], int8: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors with the factors folded into them.

    Args:
        tensors: Hugging Face names and tensors, whole.
        factors: what ``choose_factors`` returned.
        int8: the last parts of the names of the linear layers that are quantised.
    """
    readers = smoothed_readers(int8)
    for name, tensor in tensors:
        if name.endswith(".weight"):
            module = name.removesuffix(".weight")
            source = source_of(module, readers.values())
            if source is not None:  # columns that read what is divided
                tensor = _times(tensor, factors[source])
            if module in factors:  # a norm, or rows of a linear layer, that make what is divided
                inverse = 1 / factors[module]
                tensor = _times(tensor, inverse if tensor.dim() == 1 else inverse[:, None])
        yield name, tensor


def _times(tensor: Tensor, powers: Tensor) -> Tensor:
    """A tensor times powers of two, some of which float16 cannot hold, in the dtype of the tensor."""
    return (tensor.float() * powers).to(tensor.dtype)
