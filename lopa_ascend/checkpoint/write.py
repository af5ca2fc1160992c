"""Writes checkpoints; those whose linear layers are int8 in the format compressed-tensors."""

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
from lopa_ascend.checkpoint.int8_formats import compressed_tensors_config
from lopa_ascend.checkpoint.lora import merge_adapter, open_adapter
from lopa_ascend.checkpoint.read import Checkpoint, open_checkpoint
from lopa_ascend.checkpoint.smooth import choose_factors, smoothed, smoothed_weights
from lopa_ascend.checkpoint.streams import check_weights, checked_copies, quantized
from lopa_ascend.config.files import INDEX, read_json_object
from lopa_ascend.config.int8_files import CONFIG_FIELD
from lopa_ascend.families.family import Family
from lopa_ascend.families.table import SCALE

MAX_FILE_BYTES = 2 << 30
"""Bytes of tensors in a file, at most, unless a single tensor has more. They are in memory together."""
_CONFIG = "config.json"


def write_int8(
    path: Path,
    out: Path,
    family: Family,
    *,
    int8: Collection[str],
    lora: Path | None = None,
    activations: Mapping[str, Tensor] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Path:
    """Quantises a checkpoint and writes it, with its tokenizer, to another directory.

    Args:
        path: directory of the float checkpoint.
        out: the directory to write, which must be missing or empty. It is returned.
        family: the checkpoint's.
        int8: the linear layers that are quantised, as ``quantization_exclude`` calls them, e.g. "qkv_proj".
        lora: directory of a PEFT LoRA adapter that is merged before.
        activations: of the model with the adapter, as ``smooth.choose_factors`` takes them, to smooth with.

    Raises:
        CheckpointError: the checkpoint or the adapter cannot be loaded, or ``out`` is not empty.
        OSError: a file cannot be written, for example because the disk is full.
        ValueError: an activation is not finite.

    After an exception ``out`` is empty again.
    """
    checkpoint = open_to_quantize(path, out, family)
    expected = checkpoint.expected
    modules = expected.int8_modules(int8)
    kept = [expected.head, *(name for name in expected.linears if name not in modules and name != expected.head)]
    config = read_json_object(path / _CONFIG, CheckpointError)
    others = [file for file in sorted(path.iterdir()) if file.is_file() and file.name != _CONFIG]
    write_checkpoint(
        out,
        _int8_tensors(checkpoint, lora, activations, modules),
        {_CONFIG: {**config, CONFIG_FIELD: compressed_tensors_config(kept)}},
        [file for file in others if not (".safetensors" in file.name or file.suffix in PICKLE_SUFFIXES)],
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
    """Writes the directory of a model.

    Args:
        out: the directory, which must be missing or empty.
        tensors: by name. Those of a file are in memory together.
        objects: content of JSON files, by name. They are written last, in this order, so that a directory that was not
            finished is no checkpoint.
        copied: other files that it is to have.
        max_file_bytes: bytes of tensors in a file, at most, unless a single tensor has more.

    Raises:
        CheckpointError: ``out`` is not empty.
        OSError: a file cannot be written, for example because the disk is full.

    After an exception ``out`` is as before.
    """
    _check_empty(out)
    out.mkdir(parents=True, exist_ok=True)
    with _emptied_after_failure(out):
        _write_weights(_parts(tensors, max_file_bytes), out)
        for file in copied:
            shutil.copyfile(file, out / file.name)
        for name, value in objects.items():
            _write_json(out / name, value)


def _int8_tensors(
    checkpoint: Checkpoint,
    lora: Path | None,
    activations: Mapping[str, Tensor] | None,
    modules: Collection[str],
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the checkpoint to write, with the layers ``modules`` as int8. Those that stay float have the
    dtype that they had."""
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
        weights = smoothed_weights(checkpoint.expected, modules)
        tensors = smoothed(tensors, choose_factors(float_tensors(), activations, weights), weights)
    for name, tensor in quantized(tensors, modules):
        is_float_layer = name in dtypes and tensor.is_floating_point()
        stored = tensor.to(dtypes[name]) if is_float_layer else tensor
        check_weights(checkpoint, name, stored)
        yield name, stored


def _write_weights(parts: Iterator[dict[str, Tensor]], out: Path) -> None:
    """Writes files of weights and their index."""
    files: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05}.safetensors"
        try:
            save_file(_as_stored(part), str(out / file), metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{out / file}: cannot be written: {error}") from error
        files |= dict.fromkeys(part, file)
    index = out / INDEX
    _write_json(index, {"metadata": {}, "weight_map": files})
    for file in set(files.values()):
        shutil.copymode(index, out / file)  # safetensors makes files that only their owner can read


@contextmanager
def _emptied_after_failure(folder: Path) -> Iterator[None]:
    """Removes all files of a folder, which was empty before, if the ``with`` block fails or is interrupted."""
    try:
        yield
    except BaseException:
        for file in folder.iterdir():
            file.unlink()
        raise


def open_to_quantize(path: Path, out: Path, family: Family) -> Checkpoint:
    """Checks the directory of a checkpoint to quantise, and where the result goes, without reading a weight.

    Raises:
        CheckpointError: the checkpoint cannot be loaded or is int8 already, or ``out`` is not empty.
    """
    checkpoint = open_checkpoint(path, family)
    if checkpoint.int8 is not None:
        raise CheckpointError(f"{path}: its weights are int8 already, by {checkpoint.int8.source}")
    _check_empty(out)
    return checkpoint


def _check_empty(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out}: exists, expected a missing or empty directory")


def _parts(tensors: Iterator[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Tensors by name, as many together as ``max_bytes`` allow."""
    part: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if part and sum(other.nbytes for other in part.values()) + tensor.nbytes > max_bytes:
            yield part
            part = {}
        part[name] = tensor
    if part:
        yield part


def _as_stored(part: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as the format has them: contiguous, and scales as columns."""
    return {
        name: (tensor[:, None] if name.endswith(f".weight{SCALE}") else tensor).contiguous()
        for name, tensor in part.items()
    }


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
