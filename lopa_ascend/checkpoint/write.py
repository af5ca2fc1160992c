"""Writes checkpoints. Quantised layers are in the format compressed-tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lopa_ascend.checkpoint.files import PICKLE_SUFFIXES, CheckpointError
from lopa_ascend.checkpoint.fp8_formats import float_quantized_config
from lopa_ascend.checkpoint.int4_formats import packed_config
from lopa_ascend.checkpoint.int8_formats import compressed_tensors_config
from lopa_ascend.checkpoint.lora import merge_adapter, open_adapter
from lopa_ascend.checkpoint.read import Checkpoint, open_checkpoint
from lopa_ascend.checkpoint.smooth import choose_factors, smoothed, smoothed_weights
from lopa_ascend.checkpoint.streams import check_weights, checked_copies, quantized
from lopa_ascend.config.files import INDEX, read_json_object
from lopa_ascend.config.quantized_files import CONFIG_FIELD
from lopa_ascend.families.family import Family
from lopa_ascend.families.table import SCALE, Quantized

MAX_FILE_BYTES = 2 << 30
"""Most bytes of tensors in a file, unless one tensor has more. They are in memory together."""
_CONFIG = "config.json"


def write_quantized(
    path: Path,
    out: Path,
    family: Family,
    *,
    linears: Collection[str],
    form: tuple[str, int] = ("int8", 0),
    lora: Path | None = None,
    activations: Mapping[str, Tensor] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Path:
    """Quantises a float checkpoint and writes it, with its tokenizer, to the directory ``out``, which is returned. It
    must be missing or empty, and is empty again after an exception.

    Args:
        linears: the linear layers to quantise, by their names in ``quantization_exclude``, e.g. "qkv_proj".
        form: "int8", "int4" or "fp8", and for int4 the inputs of a group.
        lora: directory of a PEFT LoRA adapter, which is merged first.
        activations: of the model with the adapter, to smooth with; see ``smooth.choose_factors``.

    Raises:
        CheckpointError: the checkpoint or the adapter cannot be loaded, or ``out`` is not empty.
        OSError: a file cannot be written, for example because the disk is full.
        ValueError: an activation is not finite, or groups do not divide the inputs of a layer.
    """
    checkpoint = open_to_quantize(path, out, family)
    expected = checkpoint.expected
    layers = expected.quantized(linears, form[1], is_fp8=form[0] == "fp8")
    expected.check_groups(layers, 1, [1])
    kept = [expected.head, *(n for n in expected.linears if n not in layers.modules and n != expected.head)]
    describe = {"int8": compressed_tensors_config, "fp8": float_quantized_config}.get(layers.codes)
    described = packed_config(kept, layers.group_size) if describe is None else describe(kept)
    drafts = [path / family.draft_adapter] if family.draft_adapter else []
    config = read_json_object(path / _CONFIG, CheckpointError)
    others = [file for file in sorted(path.iterdir()) if file.is_file() and file.name != _CONFIG]
    write_checkpoint(
        out,
        _quantized_tensors(checkpoint, lora, activations, layers),
        {_CONFIG: {**config, CONFIG_FIELD: described}},
        [
            *(file for file in others if not (".safetensors" in file.name or file.suffix in PICKLE_SUFFIXES)),
            *(folder for folder in drafts if folder.is_dir()),
        ],
        max_file_bytes,
    )
    return out


def write_checkpoint(
    out: Path,
    tensors: Iterator[tuple[str, Tensor]],
    objects: Mapping[str, object],
    copied: Iterable[Path],
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes the directory of a model. ``out`` must be missing or empty, and is so again after an exception.

    Args:
        objects: JSON files by name. They are written last, in this order: an unfinished directory is no checkpoint.
        copied: other files and folders.
        max_file_bytes: see ``MAX_FILE_BYTES``.

    Raises:
        CheckpointError: ``out`` is not empty.
        OSError: a file cannot be written, for example because the disk is full.
    """
    _check_empty(out)
    out.mkdir(parents=True, exist_ok=True)
    with _emptied_after_failure(out):
        _write_weights(_parts(tensors, max_file_bytes), out)
        for file in copied:
            (shutil.copytree if file.is_dir() else shutil.copyfile)(file, out / file.name)
        for name, value in objects.items():
            _write_json(out / name, value)


def _quantized_tensors(
    checkpoint: Checkpoint,
    lora: Path | None,
    activations: Mapping[str, Tensor] | None,
    layers: Quantized,
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the checkpoint to write. Float tensors keep their dtype."""
    architecture = checkpoint.config.model_type
    adapter = None if lora is None else open_adapter(lora, checkpoint.expected, architecture)
    dtypes: dict[str, torch.dtype] = {}

    def float_tensors() -> Iterator[tuple[str, Tensor]]:
        tensors = noting_dtypes(checkpoint.tensors())
        return tensors if adapter is None else merge_adapter(tensors, adapter)

    def noting_dtypes(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            dtypes[name] = tensor.dtype
            yield name, tensor

    tensors = checked_copies(float_tensors(), checkpoint)
    if activations is not None:
        weights = smoothed_weights(checkpoint.expected, layers.modules)
        tensors = smoothed(tensors, choose_factors(float_tensors(), activations, weights), weights)
    for name, tensor in quantized(tensors, layers):
        is_float_layer = name in dtypes and tensor.is_floating_point() and tensor.dtype != torch.float8_e4m3fn
        stored = tensor.to(dtypes[name]) if is_float_layer else tensor
        check_weights(checkpoint, name, stored)
        if not layers.group_size:
            yield name, stored[:, None] if name.endswith(f".weight{SCALE}") else stored
        elif name.endswith(f".weight{SCALE}"):
            yield name, stored.bfloat16()
        elif stored.dtype == torch.uint8:
            yield f"{name}_packed", stored.view(torch.int32)
            yield f"{name}_shape", torch.tensor(checkpoint.expected.specs[name].shape)
        else:
            yield name, stored


def _write_weights(parts: Iterator[dict[str, Tensor]], out: Path) -> None:
    """Writes files of weights and their index."""
    files: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05}.safetensors"
        try:
            save_file({name: t.contiguous() for name, t in part.items()}, str(out / file), metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{out / file}: cannot be written: {error}") from error
        files |= dict.fromkeys(part, file)
    index = out / INDEX
    _write_json(index, {"metadata": {}, "weight_map": files})
    for file in set(files.values()):
        shutil.copymode(index, out / file)  # safetensors makes files that only their owner can read


@contextmanager
def _emptied_after_failure(folder: Path) -> Iterator[None]:
    """Empties a folder if the ``with`` block fails or is interrupted."""
    try:
        yield
    except BaseException:
        for file in folder.iterdir():
            if file.is_dir():
                shutil.rmtree(file)
            else:
                file.unlink()
        raise


def open_to_quantize(path: Path, out: Path, family: Family) -> Checkpoint:
    """Opens a checkpoint to quantise. Raises CheckpointError if it cannot be loaded or is quantised already, or ``out``
    is not empty."""
    checkpoint = open_checkpoint(path, family)
    found = checkpoint.int8 or checkpoint.int4 or checkpoint.fp8
    if found is not None and checkpoint.quantized is not None:
        raise CheckpointError(f"{path}: its weights are {checkpoint.quantized.codes} already, by {found.source}")
    _check_empty(out)
    return checkpoint


def _check_empty(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out}: exists, expected a missing or empty directory")


def _parts(tensors: Iterator[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Divides tensors into parts of at most ``max_bytes``."""
    part: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if part and sum(other.nbytes for other in part.values()) + tensor.nbytes > max_bytes:
            yield part
            part = {}
        part[name] = tensor
    if part:
        yield part


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
