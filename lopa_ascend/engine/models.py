"""Models from a directory: checked before any weight is read, then loaded."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from lopa_ascend import checkpoint
from lopa_ascend.backend import find_device
from lopa_ascend.backend.interface import Ops
from lopa_ascend.config import EngineConfig, ModelConfig, ParameterError
from lopa_ascend.config.files import ADAPTER_WEIGHTS
from lopa_ascend.families import Family
from lopa_ascend.families.table import Quantized, Shard, Tensors
from lopa_ascend.model.base import Model
from lopa_ascend.model.plain import Build, build_module, tensors_of
from lopa_ascend.model.registry import find_decoder, find_model, find_plain
from lopa_ascend.parallel.collectives import Group
from lopa_ascend.types import DREAM, ModelProperties

logger = logging.getLogger(__name__)


class ModelSource(ABC):
    """A model that has passed every check that needs no weights."""

    config: ModelConfig
    """Of the whole model, not of one rank's part."""
    properties: ModelProperties
    codes: str | None = None
    """Dtype of linear weights, stored or quantised; None: floats."""

    @property
    @abstractmethod
    def identity(self) -> object:
        """What compiled steps depend on; its ``repr`` is part of the key of graphs kept on disk."""

    @abstractmethod
    def weight_bytes(self, ranks: int) -> int:
        """Bytes of one rank's weights, of ``ranks`` that split the model, without padding."""

    @abstractmethod
    def load(self, ops: Ops, tp: Group, num_positions: int) -> Model:
        """Reads the weights of this rank's part. The longest sequence has ``num_positions``.

        Raises:
            CheckpointError: the adapter cannot be loaded (found before any weight is read), or weights have wrong
                values, such as NaN.
            ValueError: the configured dtype is unknown (found before any weight is read).
        """


def open_model(path: Path, config: EngineConfig, device: torch.device) -> ModelSource:
    """Finds which model a Hugging Face directory holds, and checks it without reading a weight.

    Raises:
        CheckpointError: the directory does not hold such a model, or it is not registered.
        ModelError: a model in plain torch cannot be traced.
        ParameterError: a model in plain torch cannot be split.
        ValueError: the dtype is unknown.
    """
    raw = checkpoint.config_json(path)
    model_type = str(raw.get("model_type"))
    try:
        family = find_model(raw)
        if family is None:
            build = find_plain(model_type)
    except ValueError as error:
        raise checkpoint.CheckpointError(f"{path / 'config.json'}: {error}") from error
    if family is not None:
        return SplitSource(path, config, family)
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
    return PlainSource(path, config, build, device)


def _warn(doubts: Iterable[str]) -> None:
    for doubt in doubts:
        logger.warning("%s", doubt)


class SplitSource(ModelSource):
    """A model of a family, in fused ops."""

    def __init__(self, path: Path, config: EngineConfig, family: Family):
        self._family, self._options, self.properties = family, config, family.properties
        self._class = find_decoder(family)
        self._checkpoint = found = checkpoint.open_checkpoint(path, family)
        self.config = found.config
        folder = path / family.draft_adapter if family.draft_adapter else None
        self._draft_adapter, self._draft_bytes = None, 0
        if folder is not None and folder.is_dir():
            self._draft_adapter = checkpoint.open_draft_adapter(folder, found.expected, family.name)
            self._draft_bytes = (folder / ADAPTER_WEIGHTS).stat().st_size
        is_fp8 = config.codes == "fp8"
        wanted = found.expected.quantized(config.quantized_layers(), config.group_size, is_fp8=is_fp8)
        self._layers = layers = found.quantized or wanted
        device = find_device(config.device)
        if found.quantized is not None:
            _check_stored(config, found, found.quantized)
        elif config.codes is not None:
            device.check_codes("quantization", repr(config.quantization), config.codes)
        found.expected.check_groups(layers, config.tensor_parallel_size, found.config.tensor_parallel_sizes())
        model = checkpoint.with_dtype(found.config, config.dtype)
        self.codes = layers.codes if layers.modules else None
        doubts = device.check_model(config, model, path, codes=self.codes)
        _warn((*found.doubts, *doubts))

    @property
    def identity(self) -> object:
        layers = sorted(self._layers.modules), self._layers.codes, self._layers.group_size, self._layers.has_zeros
        return self.config, layers, self._family.decoder, self._draft_adapter is not None

    def weight_bytes(self, ranks: int) -> int:
        size: int = getattr(torch, checkpoint.with_dtype(self.config, self._options.dtype).dtype).itemsize
        return self._checkpoint.expected.num_bytes(size, self._layers, ranks) + self._draft_bytes

    def load(self, ops: Ops, tp: Group, num_positions: int) -> Model:
        options = self._options
        config, weights = checkpoint.load(
            self._checkpoint,
            lora=options.lora,
            draft_adapter=self._draft_adapter,
            dtype=options.dtype,
            device=str(ops.device),
            shard=Shard(tp.rank, tp.size),
            layers=self._layers,
        )
        return self._class(self._family, config, weights, ops, tp, num_positions)


def _check_stored(config: EngineConfig, found: checkpoint.Checkpoint, layers: Quantized) -> None:
    """Refuses settings that do not go with weights that are quantised already: CheckpointError for an adapter,
    ParameterError for a device, a graph mode or a setting that asks for other weights."""
    find_device(config.device).check_codes("model", str(found.path), layers.codes)
    config.check_int8("model", f"{found.path}, whose weights are {layers.codes},")
    again = f"{found.path}, whose weights are {layers.codes} already; quantise the float checkpoint anew"
    if config.quantization_exclude:
        raise ParameterError("quantization_exclude", f"has no effect on {again}")
    if config.quantization is not None and (config.codes, config.group_size) != (layers.codes, layers.group_size):
        raise ParameterError("quantization", f"{config.quantization!r} has no effect on {again}, or leave it out")
    checkpoint.refuse_adapter(found, config.lora)


class PlainSource(ModelSource):
    """A traced module in plain torch, and the checkpoint of its weights."""

    def __init__(self, path: Path, config: EngineConfig, build: Build, device: torch.device):
        from lopa_ascend.graph.fusion.trace import trace  # imports sympy, which no other kind of model needs

        self._options, self.properties = config, DREAM

        def expect(found: ModelConfig) -> Tensors:
            # The dtype of the file's weights is not known yet, and names and shapes do not depend on it.
            return tensors_of(build_module(build, replace(found, dtype="float32")))

        self._checkpoint = checkpoint.open_checkpoint(path, expect)
        _warn(self._checkpoint.doubts)
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
