"""Models in plain torch: what the engine needs of a module, and what its checkpoint must hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from lopa_ascend.checkpoint import DTYPES
from lopa_ascend.config import ModelConfig
from lopa_ascend.families.table import Row, Tensors, TensorSpec

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, q, k, v)``: the attention of one layer. Writes k and v [T, K, D] to the pages, and gives the result
for the queries q [T, H, D] of all tokens, [T, H * D]. Every layer must call it once."""
Build = Callable[[ModelConfig], nn.Module]
"""Makes the module of a plain model; as a rule, its class."""


class ModelError(ValueError):
    """A model in plain torch that the engine cannot run; the message names the model and what is wrong with it."""


class PlainModel(Protocol):
    """An ``nn.Module`` with these members. Its parameters and persistent buffers have their names in the checkpoint;
    its other buffers are computed in the constructor."""

    lm_head: nn.Linear
    """[hidden_size] -> [vocab_size]; applied by the engine, to some of the tokens."""

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Final normed hidden states [T, hidden_size].

        Args:
            tokens: ids of all rows of all sequences, one after the other, int32 or int64 [T].
            positions: in their sequences, int32 or int64 [T].
            attend: the engine's attention; the only place where one token depends on another.
        """
        ...


def build_module(build: Build, config: ModelConfig) -> nn.Module:
    """The module of a plain model, with parameters on the meta device, without memory. ModelError if it is no module,
    or has no head that fits."""
    with _meta_parameters(DTYPES[config.dtype]):
        module = build(config)
    name = config.model_type
    if not isinstance(module, nn.Module):
        raise ModelError(f"model_type {name!r}: expected an nn.Module, got {type(module).__name__}")
    head: Any = getattr(module, "lm_head", None)
    if not isinstance(head, nn.Linear):
        raise ModelError(f"model_type {name!r}: lm_head must be an nn.Linear, found {type(head).__name__}")
    expected = (config.vocab_size, config.hidden_size)
    if head.weight.shape != expected:
        raise ModelError(
            f"model_type {name!r}: lm_head.weight has shape {list(head.weight.shape)}, not {list(expected)}"
        )
    return module.eval().requires_grad_(False)


def tensors_of(module: nn.Module) -> Tensors:
    """The tensors that the checkpoint of a plain model must hold: its parameters and persistent buffers. A parameter in
    several places has the first one's name, and the others may be missing."""
    specs: dict[str, TensorSpec] = {}
    linears = {f"{name}.weight" for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    copies: dict[str, str] = {}
    names: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        first = names.setdefault(id(tensor), name)
        if first == name:
            linear = "" if name in linears else None
            specs[name] = TensorSpec(name, name, tuple(tensor.shape), Row(name, name, linear=linear))
        else:
            copies[name] = first
    return Tensors(specs, copies)


@contextmanager
def _meta_parameters(dtype: torch.dtype) -> Iterator[None]:
    """Gives parameters that are made inside the ``with`` this dtype and no memory: torch's layers would fill it at
    random, which takes minutes and twice the model's size. Buffers stay as the module makes them."""
    moved = WeakIdKeyDictionary()  # a parameter in several places stays one

    def move(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta:
            return None
        meta = nn.Parameter(torch.empty_like(parameter, device="meta", dtype=dtype), requires_grad=False)
        found: nn.Parameter = moved.setdefault(parameter, meta)
        return found

    hook = register_module_parameter_registration_hook(move)  # type: ignore[arg-type]  # it may return a parameter
    try:
        yield
    finally:
        hook.remove()
