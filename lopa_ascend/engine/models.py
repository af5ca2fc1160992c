"""Models of all architectures, from a directory: checked before any weight is read, then loaded."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path

import torch

from lopa_ascend import checkpoint
from lopa_ascend.backend.interface import Ops
from lopa_ascend.config import EngineConfig, ExpertsConfig, ModelConfig, ParameterError
from lopa_ascend.config.engine import TND_HEADS
from lopa_ascend.model.base import Model, SplitModel
from lopa_ascend.model.plain import Build, build_module, tensors_of
from lopa_ascend.model.registry import FUSED, check_model_type, find_fused, find_plain
from lopa_ascend.parallel.collectives import Group
from lopa_ascend.types import DREAM, ModelProperties

MIN_GROUP = 2
"""An NPU's kernel of routing takes groups of more experts than these."""
logger = logging.getLogger(__name__)


class ModelSource(ABC):
    """A model that is ready to be loaded: it has passed every check that needs no weights."""

    config: ModelConfig
    """The configuration of the whole model, not of one rank's part."""
    properties: ModelProperties

    @property
    @abstractmethod
    def identity(self) -> object:
        """What the model's compiled steps depend on. Its ``repr`` is part of the key of graphs kept on disk."""

    @abstractmethod
    def weight_bytes(self, ranks: int) -> int:
        """Bytes of the weights of one of ``ranks`` ranks that split the model, without padding."""

    @abstractmethod
    def load(self, ops: Ops, tp: Group, num_positions: int) -> Model:
        """Reads the weights of this rank's part.

        Args:
            num_positions: positions that a sequence may have.

        Raises:
            CheckpointError: the adapter cannot be loaded, found before any weight is read; or weights have wrong
                values, such as NaN.
            ValueError: the configured dtype is unknown; found before any weight is read.
        """


def open_model(path: Path, config: EngineConfig, device: torch.device) -> ModelSource:
    """Finds the architecture of a directory and checks the directory against it, without reading a weight.

    Args:
        path: a Hugging Face directory.
        config: the engine's.
        device: where the model will run.

    Raises:
        CheckpointError: the directory does not hold such a model, or its architecture is not registered.
        ModelError: a model in plain torch cannot be traced.
        ParameterError: a model in plain torch cannot be split.
        ValueError: the dtype is unknown.
    """
    try:
        model_type = check_model_type(checkpoint.model_type(path))
        build = None if model_type in FUSED else find_plain(model_type)
    except ValueError as error:
        raise checkpoint.CheckpointError(f"{path / 'config.json'}: {error}") from error
    if build is None:
        return SplitSource(path, config, find_fused(model_type))
    if config.quantization is not None:
        raise ParameterError(
            "quantization",
            f"must not be given for model_type {model_type!r}, got {config.quantization!r}: models in plain torch are "
            "not quantised",
        )
    if config.tensor_parallel_size > 1:
        raise ParameterError(
            "tensor_parallel_size",
            f"must be 1 for model_type {model_type!r}, got {config.tensor_parallel_size}: a model in plain torch is "
            "not split; branch_parallel_size may be larger",
        )
    return PlainSource(path, config, model_type, build, device)


def _warn(found: checkpoint.Checkpoint) -> None:
    for doubt in found.doubts:
        logger.warning("%s", doubt)


def _warn_of_attention(config: EngineConfig, dtype: str, head_dim: int) -> None:
    """Warns of settings that the NPU's attention kernel will refuse: its own error comes in the first step only, and
    names no setting."""
    if dtype == "float32":
        logger.warning("attention on an NPU takes no float32; choose dtype bfloat16")
    if config.attention_layout != "BSH" and head_dim not in TND_HEADS:
        logger.warning(
            "attention_layout %s takes heads of %s elements; this model has heads of %d, so choose BSH",
            config.attention_layout,
            " or ".join(map(str, TND_HEADS)),
            head_dim,
        )


class SplitSource(ModelSource):
    """A model of an architecture in fused ops."""

    def __init__(self, path: Path, config: EngineConfig, architecture: type[SplitModel]):
        self._class, self._options, self.properties = architecture, config, architecture.properties
        self._checkpoint = found = checkpoint.open_checkpoint(path, architecture.architecture)
        self.config = found.config
        int8 = found.int8.kinds if found.int8 else found.expected.int8_modules(config.int8_layers())
        self._int8_modules = sorted(int8)
        if found.int8 is not None:
            _check_stored_int8(config, found)
        dtype = checkpoint.with_dtype(found.config, config.dtype).dtype
        if config.device == "cuda" and found.config.experts is not None:
            raise ParameterError(
                "model", f"{path} has experts, for which device cuda has no kernels; choose cpu or npu"
            )
        if config.device == "npu" and found.config.experts is not None:
            _check_experts_on_npu(found.config.experts, path, has_int8=bool(int8))
        if config.device == "npu" and dtype != "bfloat16":
            message = f"on device npu needs dtype bfloat16, got {dtype}"
            if config.quantization is not None:
                raise ParameterError("quantization", f"'w8a8' {message}")
            if found.int8 is not None:
                raise ParameterError("model", f"int8 weights {message}")
        _warn(found)
        if config.device == "npu":
            _warn_of_attention(config, dtype, found.config.head_dim)

    @property
    def identity(self) -> object:
        return self.config, self._int8_modules

    def weight_bytes(self, ranks: int) -> int:
        size = getattr(torch, checkpoint.with_dtype(self.config, self._options.dtype).dtype).itemsize
        total = 0
        for spec in self._checkpoint.expected.specs.values():
            is_int8 = spec.row.linear is not None and spec.module in self._int8_modules
            share = 1 if spec.split_axis is None else ranks
            total += math.prod(spec.shape) * (1 if is_int8 else size) // share
        return total

    def load(self, ops: Ops, tp: Group, num_positions: int) -> Model:
        options = self._options
        config, weights = checkpoint.load(
            self._checkpoint,
            lora=options.lora,
            dtype=options.dtype,
            device=str(ops.device),
            shard=checkpoint.Shard(tp.rank, tp.size),
            int8=options.int8_layers(),
        )
        return self._class(config, weights, ops, tp, num_positions)


def _check_experts_on_npu(experts: ExpertsConfig, path: Path, *, has_int8: bool) -> None:
    """Refuses experts that the kernels of an NPU do not take.

    Raises:
        ParameterError: they are int8, or their groups are too small.
    """
    if has_int8:
        message = f"'w8a8' does not go with device npu for the mixture of experts of {path}; leave it out"
        raise ParameterError("quantization", message)
    size = experts.num_experts // experts.num_groups
    if size <= MIN_GROUP:
        found = f"{path}: groups of {size} experts (num_experts / n_group)"
        raise ParameterError("model", f"{found} are too small for device npu, which takes more than {MIN_GROUP}")


def _check_stored_int8(config: EngineConfig, found: checkpoint.Checkpoint) -> None:
    """Refuses settings that do not go with a checkpoint whose weights are int8 already.

    Raises:
        CheckpointError: an adapter cannot be merged into int8 weights.
        ParameterError: the device or the graph mode cannot run int8 layers, or layers are excluded that are int8.
    """
    assert found.int8 is not None
    config.check_int8("model", f"{found.path}, whose weights are int8,")
    if config.quantization_exclude:
        message = f"has no effect on {found.path}, whose weights are int8 already; quantise the float checkpoint anew"
        raise ParameterError("quantization_exclude", message)
    checkpoint.refuse_adapter(found, config.lora)


class PlainSource(ModelSource):
    """A model in plain torch: its module, traced, and the checkpoint of its weights."""

    def __init__(self, path: Path, config: EngineConfig, model_type: str, build: Build, device: torch.device):
        from lopa_ascend.graph.fusion.trace import trace  # imports sympy, which no other kind of model needs

        self._options, self.properties = config, DREAM

        def expect(found: ModelConfig) -> checkpoint.Tensors:
            # The dtype of the file's weights is not known yet, and names and shapes do not depend on it.
            return tensors_of(build_module(build, replace(found, dtype="float32")))

        self._checkpoint = checkpoint.open_checkpoint(path, checkpoint.Architecture(model_type, expect, family=None))
        _warn(self._checkpoint)
        self.config = checkpoint.with_dtype(self._checkpoint.config, config.dtype)
        self._module = build_module(build, self.config)
        self._trace = trace(self._module, self.config, device)

    @property
    def identity(self) -> object:
        return self.config, self._trace.digest

    def weight_bytes(self, ranks: int) -> int:
        return sum(tensor.nbytes for tensor in self._module.state_dict().values())

    def load(self, ops: Ops, tp: Group, num_positions: int) -> Model:
        from lopa_ascend.graph.fusion.fused_model import fuse_model  # imports sympy as well

        options = self._options
        dtypes = {name: tensor.dtype for name, tensor in self._module.state_dict().items()}
        _, tensors = checkpoint.load(self._checkpoint, lora=options.lora, dtypes=dtypes, device=str(ops.device))
        tensors |= {name: tensors[original] for name, original in self._checkpoint.expected.copies.items()}
        return fuse_model(self.config, self._module, self._trace, tensors, ops)
