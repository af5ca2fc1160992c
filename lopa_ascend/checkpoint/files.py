"""Checks directories of weights, and the headers of safetensors files, without reading any weight."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import regex

from lopa_ascend.config.files import MAX_HEADER, check_regular, parse_json_object, shown

ITEM_SIZES = {"F32": 4, "BF16": 2, "F16": 2}
"""Bytes of a value, by the safetensors name of its dtype: the dtypes of float tensors."""
CODE_SIZES = {"I8": 1, "I32": 4, "I64": 8, "F8_E4M3": 1}
"""Dtypes that only a quantised checkpoint may hold."""
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_LENGTH_FIELD = 8
"""Bytes of the header's length, at the beginning of a safetensors file."""
_MAX_NAME = 256
"""Characters of a tensor's name."""
_MAX_PATTERN = 10_000
"""Characters of a regular expression."""
_PATTERN_SECONDS = 0.5
"""Limit for a regular expression and one name. It takes microseconds, unless it tries exponentially many ways."""


class CheckpointError(ValueError):
    """A directory of a model or adapter cannot be loaded. The message names file, tensor or field, and what was
    expected."""


@dataclass(frozen=True, slots=True)
class Header:
    """The description of one tensor in a safetensors file."""

    file: Path
    dtype: str
    """By its safetensors name."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * (ITEM_SIZES | CODE_SIZES)[self.dtype]


def check_directory(path: Path) -> None:
    """Raises CheckpointError if the path is no directory that this user may read."""
    try:
        is_directory = path.is_dir()
        exists = is_directory or path.exists()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if not is_directory:
        found = "a file" if exists else "missing"
        expected = "a directory in the Hugging Face layout, or a name on the hub, ORG/NAME or ORG/NAME@REVISION"
        raise CheckpointError(f"{path}: expected {expected}, but it is {found}")
    if not os.access(path, os.R_OK | os.X_OK):
        raise CheckpointError(f"{path}: cannot be read by this user")


def no_weights_error(path: Path, expected: str) -> CheckpointError:
    """The error of a directory without the expected weights. It says if there are only pickles."""
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if pickles:
        return CheckpointError(
            f"{path}: holds only pickles ({pickles[0]}), which are never read because a pickle can run code; "
            f"expected {expected}"
        )
    return CheckpointError(f"{path}: holds no weights; expected {expected}")


def read_headers(file: Path, item_sizes: Mapping[str, int] = ITEM_SIZES) -> dict[str, Header]:
    """The tensors of a safetensors file by name, from its header alone.

    Raises:
        CheckpointError: the file is not safetensors, is truncated or too long, or has a dtype beyond ``item_sizes``.
    """
    raw, data_size = _read_raw_header(file)
    try:
        entries = parse_json_object(raw)
    except TypeError as error:
        raise CheckpointError(f"{file}: is not safetensors: its header is not a JSON object") from error
    except ValueError as error:
        raise CheckpointError(f"{file}: is not safetensors: its header is not JSON: {error}") from error
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{file}: __metadata__ is {shown(metadata)}, expected an object of texts")
    headers: dict[str, Header] = {}
    spans: dict[str, tuple[int, int]] = {}
    for name, entry in entries.items():
        check_name(file, name)
        headers[name], spans[name] = _parse_entry(file, name, entry, item_sizes)
    _check_layout(file, data_size, spans)
    return headers


def check_name(file: Path, name: str) -> None:
    """Raises CheckpointError for a tensor's name that is too long for messages, or has control characters."""
    if len(name) > _MAX_NAME or not name.isprintable():
        raise CheckpointError(
            f"{file}: a tensor has the name {shown(name)}, expected at most {_MAX_NAME} printable characters"
        )


def _read_raw_header(file: Path) -> tuple[bytes, int]:
    """The JSON text of a safetensors header, and the number of bytes of data behind it."""
    try:
        file_size = check_regular(file, CheckpointError).st_size
        with file.open("rb") as stream:
            length_field = stream.read(_LENGTH_FIELD)
            length = struct.unpack("<Q", length_field)[0] if len(length_field) == _LENGTH_FIELD else 0
            if length > file_size - _LENGTH_FIELD:
                raise CheckpointError(f"{file}: is truncated or not safetensors: {file_size} bytes, header of {length}")
            if length > MAX_HEADER:
                raise CheckpointError(f"{file}: has a header of {length} bytes, expected at most {MAX_HEADER}")
            return stream.read(length), file_size - _LENGTH_FIELD - length
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error


def _parse_entry(file: Path, name: str, entry: object, item_sizes: Mapping[str, int]) -> tuple[Header, tuple[int, int]]:
    """One entry of a header, and its tensor's bytes [begin, end) of the data."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]}:
            pass
        case _:
            raise CheckpointError(
                f"{file}: tensor {name}: expected dtype, shape and data_offsets, found {shown(entry)}"
            )
    if not _are_sizes(shape):
        raise CheckpointError(f"{file}: tensor {name}: shape {shown(shape)} is not a list of sizes")
    if not _are_sizes([begin, end]):
        raise CheckpointError(f"{file}: tensor {name}: data_offsets {shown([begin, end])} are not two positions")
    if dtype not in item_sizes:
        raise CheckpointError(
            f"{file}: tensor {name}: unsupported dtype {shown(dtype)[1:-1]}; expected {' or '.join(item_sizes)}"
        )
    header = Header(file, dtype, tuple(shape))
    if end - begin != header.num_bytes:
        raise CheckpointError(
            f"{file}: tensor {name}: {dtype} {shown(shape)} takes {header.num_bytes} bytes, "
            f"data_offsets give {end - begin}"
        )
    return header, (begin, end)


def _are_sizes(values: list[object]) -> bool:
    """Whether these are at most 8 integers from 0 to 2**63 - 1. True and False are none."""
    return len(values) <= 8 and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_layout(file: Path, data_size: int, spans: dict[str, tuple[int, int]]) -> None:
    """The format demands that the tensors' bytes [begin, end) lie back to back and fill the data."""
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


def matches_pattern(pattern: str, name: str, *, is_whole: bool) -> bool:
    """Whether a regular expression from a file matches a layer's whole name, or its beginning. Raises ValueError if the
    expression is wrong, too long or too slow."""
    if len(pattern) > _MAX_PATTERN:
        raise ValueError(f"{shown(pattern)} has {len(pattern)} characters, expected at most {_MAX_PATTERN}")
    try:
        compiled = regex.compile(pattern)
        compare = compiled.fullmatch if is_whole else compiled.match
        return compare(name, timeout=_PATTERN_SECONDS) is not None
    except TimeoutError:
        raise ValueError(
            f"{shown(pattern)} takes more than {_PATTERN_SECONDS:g} s to compare with the name of a layer, expected a "
            "regular expression without nested repetitions, or a list of names"
        ) from None
    except (regex.error, RecursionError, OverflowError, ValueError, RuntimeError) as error:
        raise ValueError(f"{shown(pattern)} is not a regular expression: {error}") from error
