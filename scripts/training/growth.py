"""Adds layers and feed-forward units to a trained model without changing what it computes."""

from __future__ import annotations

import re

import torch
from torch import Tensor

LAYER = re.compile(r"(?<=layers\.)\d+")
OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
"""What a layer adds to the residual stream are products with these."""


def with_layers(weights: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """The weights of a model with more layers that computes the same.

    New layers are spread evenly. Each is a copy of the layer before it but for its outputs, which are zero.

    Args:
        weights: of a model, by name; names of layers contain ``layers.N.``.
        count: layers wanted.

    Raises:
        ValueError: the model has more layers than that.
    """
    names: dict[int, list[str]] = {}
    for name in weights:
        if found := LAYER.search(name):
            names.setdefault(int(found[0]), []).append(name)
    if len(names) > count:
        raise ValueError(f"the checkpoint has {len(names)} layers, and a model of {count} was asked for")
    grown = {name: weight for name, weight in weights.items() if not LAYER.search(name)}
    sources = [layer * len(names) // count for layer in range(count)]
    for layer, source in enumerate(sources):
        is_new = layer > 0 and sources[layer - 1] == source
        for name in names[source]:
            weight = weights[name]
            is_zero = is_new and name.endswith(OUTPUTS)
            grown[LAYER.sub(str(layer), name)] = torch.zeros_like(weight) if is_zero else weight
    return grown


def with_units(weights: dict[str, Tensor], wide: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a model with more units in each feed-forward part that computes the same.

    New units have the inputs that they have in ``wide``, and outputs of zero.

    Args:
        weights: of a model, by name; names of layers contain ``layers.N.``.
        wide: weights of a model with the units wanted and as many layers; new units come from its last ones.

    Raises:
        ValueError: the model has more units than that.
    """
    grown = dict(weights)
    for name, weight in weights.items():
        if ".mlp." not in name:
            continue
        axis = 1 if name.endswith(OUTPUTS) else 0
        have, wanted = weight.shape[axis], wide[name].shape[axis]
        if have > wanted:
            raise ValueError(f"the checkpoint has {have} units in {name}, and a model of {wanted} was asked for")
        new = wide[name].narrow(axis, have, wanted - have)
        grown[name] = torch.cat([weight, torch.zeros_like(new) if axis == 1 else new], axis)
    return grown
