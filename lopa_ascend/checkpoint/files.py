"""Directories and safetensors headers of checkpoints, checked without reading any weight."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

ITEM_SIZES = {"F32": 4, "BF16": 2, "F16": 2}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_LIMIT_HEADER = 100_000_000
"""The safetensors library reads no larger header."""


class CheckpointError(ValueError):
    """A model or adapter directory that cannot be loaded; the message names the file, the tensor or field, and what was
    expected."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a safetensors file says of one tensor: ``dtype`` as in the file ("F32", "BF16", "F16") and its shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


def check_directory(path: Path) -> None:
    """Raises:
    CheckpointError: ``path`` is not a directory.
    """
    if not path.is_dir():
        found = "a file" if path.exists() else "missing"
        raise CheckpointError(f"{path}: expected a directory in the Hugging Face layout, but it is {found}")


def no_weights(path: Path, expected: str) -> CheckpointError:
    """The error for a directory without ``expected``; it says so if pickles are all that is there."""
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLES)
    if pickles:
        return CheckpointError(
            f"{path}: holds only pickles ({pickles[0]}), which are never read because a pickle can run code; "
            f"expected {expected}"
        )
    return CheckpointError(f"{path}: holds no weights; expected {expected}")


def read_headers(file: Path) -> dict[str, Header]:
    """The tensors of a safetensors file by name, from its header alone.

    Raises:
        CheckpointError: the file is not safetensors, is truncated or too long, or holds a dtype that is not supported.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if length > min(_LIMIT_HEADER, size - 8):
                raise CheckpointError(f"{file}: is truncated or not safetensors: {size} bytes, header of {length}")
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    try:
        entries = json.loads(raw)
    except ValueError as error:
        raise CheckpointError(f"{file}: is not safetensors: its header is not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file}: is not safetensors: its header is not a JSON object")
    entries.pop("__metadata__", None)
    spans = {name: _parse_entry(file, name, entry) for name, entry in entries.items()}
    _check_layout(file, size - 8 - length, {name: span for name, (_, span) in spans.items()})
    return {name: header for name, (header, _) in spans.items()}


def _parse_entry(file: Path, name: str, entry: object) -> tuple[Header, tuple[int, int]]:
    """One header entry and its [begin, end) in the data."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise CheckpointError(f"{file}: tensor {name}: expected dtype, shape and data_offsets, found {entry!r}")
    if not all(type(n) is int and n >= 0 for n in shape):
        raise CheckpointError(f"{file}: tensor {name}: shape {shape!r} is not a list of sizes")
    if dtype not in ITEM_SIZES:
        raise CheckpointError(f"{file}: tensor {name}: unsupported dtype {dtype}; expected {' or '.join(ITEM_SIZES)}")
    header = Header(file, dtype, tuple(shape))
    if end - begin != header.num_bytes:
        raise CheckpointError(
            f"{file}: tensor {name}: {dtype} {shape!r} takes {header.num_bytes} bytes, data_offsets give {end - begin}"
        )
    return header, (begin, end)


def _check_layout(file: Path, data_size: int, spans: dict[str, tuple[int, int]]) -> None:
    """The format wants tensors back to back from the first to the last byte."""
    position = 0
    for name, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        if begin != position:
            raise CheckpointError(f"{file}: tensor {name}: starts at byte {begin} of the data, expected {position}")
        if end > data_size:
            raise CheckpointError(
                f"{file}: tensor {name}: ends at byte {end} of the data, but the file is truncated after {data_size}"
            )
        position = end
    if position != data_size:
        raise CheckpointError(f"{file}: holds {data_size} bytes of data, expected {position}")
