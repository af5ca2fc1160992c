"""Opens the Hugging Face directory of a model: checks its JSON and headers, then yields its weights one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lopa_ascend.checkpoint.files import (
    CODE_SIZES,
    ITEM_SIZES,
    CheckpointError,
    Header,
    check_directory,
    check_name,
    no_weights_error,
    read_headers,
)
from lopa_ascend.checkpoint.fp8_formats import Fp8Description, dequantized, describe_fp8
from lopa_ascend.checkpoint.int4_formats import Int4Description, describe_int4
from lopa_ascend.checkpoint.int4_members import take_int4_members
from lopa_ascend.checkpoint.int8_formats import Int8Description, describe_int8
from lopa_ascend.checkpoint.int8_members import split_members
from lopa_ascend.config import ConfigError, ModelConfig
from lopa_ascend.config.files import INDEX, SINGLE_FILE, read_json_object, shown
from lopa_ascend.config.int4_files import int4_description
from lopa_ascend.config.quantized_files import CONFIG_FIELD, MODELSLIM, MODELSLIM_WEIGHTS, fp8_format
from lopa_ascend.families.family import Family
from lopa_ascend.families.reading import eos_ids, read_config
from lopa_ascend.families.registry import with_name
from lopa_ascend.families.table import Quantized, Tensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""By the name in config.json."""
_DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Name in a safetensors file -> name in config.json."""


def map_tensor(file: Path, name: str) -> torch.Tensor:
    """A tensor as stored, mapped from its file: only the parts that are used are read. They count as memory of this
    process. Each call maps the file anew, so this memory is freed with the tensor.

    Raises:
        CheckpointError: the file has changed since it was checked.
    """
    try:
        with safe_open(str(file), framework="pt") as handle:
            tensor: torch.Tensor = handle.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: tensor {name}: cannot be read ({error})") from error
    return tensor


@dataclass(frozen=True)
class Checkpoint:
    """The directory of a model that has passed every check."""

    path: Path
    config: ModelConfig
    expected: Tensors
    files: Mapping[str, Path]
    """The file of each tensor, in the order of ``expected``."""
    copies: Mapping[str, Path]
    """The file of each tied tensor that is stored nevertheless."""
    doubts: tuple[str, ...]
    """Warnings of possible mistakes in the files."""
    int8: Int8Description | None = None
    int4: Int4Description | None = None
    fp8: Fp8Description | None = None
    members: Mapping[str, Mapping[str, Path]] = field(default_factory=dict)
    """By quantised layer: the files of its members by the last part of their names (see ``int8_members``,
    ``int4_members`` and ``fp8_formats``)."""

    @property
    def quantized(self) -> Quantized | None:
        """The linear layers that are stored as int8, int4 or fp8, and not read as floats; None: there are none."""
        if self.int4 is not None:
            return self.int4.layers
        if self.fp8 is not None:
            return None if self.fp8.block else Quantized(self.fp8.modules, is_fp8=True)
        return None if self.int8 is None else Quantized(frozenset(self.int8.kinds))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors, in the order of ``files``, one at a time, for checkpoints without int4 layers; see
        ``map_tensor``. Weights in fp8 with scales of blocks are rounded to the model's dtype."""
        block, dtype = None if self.fp8 is None else self.fp8.block, DTYPES[self.config.dtype]
        for name, file in self.files.items():
            tensor, module = map_tensor(file, name), name.removesuffix(".weight")
            if block is not None and module in self.members and module != name:
                (scale,) = self.members_of(module).values()
                tensor = dequantized(file, module, tensor, scale, block).to(dtype)
            yield name, tensor

    def members_of(self, module: str) -> dict[str, torch.Tensor]:
        """The members of a layer by the last part of their names; see ``map_tensor``."""
        return {part: map_tensor(file, f"{module}.{part}") for part, file in self.members[module].items()}


PlainTensors = Callable[[ModelConfig], Tensors]
"""The tensors of a model in plain torch."""


def config_json(path: str | Path) -> dict[str, Any]:
    """The fields of config.json. Raises CheckpointError if the directory or the file is missing, or the file is no JSON
    object."""
    check_directory(Path(path))
    return with_name(read_json_object(Path(path) / "config.json", CheckpointError), path)


def open_checkpoint(path: str | Path, model: Family | PlainTensors) -> Checkpoint:
    """Checks the directory of a model without reading a weight. config.json must describe ``model``.

    Raises:
        CheckpointError: a file, field or tensor is missing, malformed, or does not fit the others.
    """
    path, family = Path(path), model if isinstance(model, Family) else None
    raw = config_json(path)
    generation = read_json_object(path / "generation_config.json", CheckpointError, optional=True)
    try:
        config = read_config(raw, generation, str(path / "config.json"), family)
        doubts = _eos_doubts(path, raw, generation, config)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    expected = model.tensors(config) if isinstance(model, Family) else model(config)
    int8 = None if family is None else describe_int8(path, raw, expected)
    headers, source = _find_tensors(path, int8, has_codes=family is not None and _names_codes(path, raw))
    int4 = None if family is None or int8 is not None else describe_int4(path, raw, expected, headers)
    fp8, members = None, split_members(int8, expected, headers) if int8 else {}
    if int4 is not None:
        members = take_int4_members(int4, expected, headers)
    elif family is not None and int8 is None:
        fp8, members = describe_fp8(path, raw, expected, headers)
    _check_tensors(config.model_type, expected, headers, source)
    config = replace(config, dtype=_choose_dtype(path, raw, config, [headers[name] for name in expected.specs]))
    return Checkpoint(
        path,
        config,
        expected,
        files={name: headers[name].file for name in expected.specs},
        copies={name: headers[name].file for name in expected.copies if name in headers},
        doubts=(*doubts, *_static_doubts(int8), *_static_doubts(fp8)),
        int8=int8,
        int4=int4,
        fp8=fp8,
        members={module: {part: header.file for part, header in parts.items()} for module, parts in members.items()},
    )


def _names_codes(path: Path, raw: Mapping[str, Any]) -> bool:
    """Whether the directory describes int4 or fp8 layers."""
    return int4_description(path, raw, CheckpointError) is not None or fp8_format(raw.get(CONFIG_FIELD)) is not None


def _static_doubts(description: Int8Description | Fp8Description | None) -> tuple[str, ...]:
    """A warning if the checkpoint has scales of activations, which are not used."""
    if description is None or not description.static():
        return ()
    found = f"{description.source}: has static scales for the activations of {', '.join(description.static())}"
    return (f"{found}; they are not used: activations are quantised token by token when they run",)


def _eos_doubts(path: Path, raw: dict[str, Any], generation: dict[str, Any], config: ModelConfig) -> tuple[str, ...]:
    """A warning if config.json and generation_config.json name EOS ids without a common one. It is no error: fine-tuned
    models often keep the old ``config.json``."""
    in_config = eos_ids(raw.get("eos_token_id"), config.vocab_size, str(path / "config.json"))
    if not in_config or generation.get("eos_token_id") is None or {*in_config} & {*config.eos_token_ids}:
        return ()
    file, used = path / "generation_config.json", shown(generation["eos_token_id"])
    return (f"{file}: eos_token_id is {used}, and {shown(raw['eos_token_id'])} in config.json; the former is used",)


def _find_tensors(path: Path, int8: Int8Description | None, *, has_codes: bool) -> tuple[dict[str, Header], Path]:
    """The header of each tensor by name, and the file that lists the tensors."""
    item_sizes = ITEM_SIZES | CODE_SIZES if int8 is not None or has_codes else ITEM_SIZES
    if (path / SINGLE_FILE).exists():
        return read_headers(path / SINGLE_FILE, item_sizes), path / SINGLE_FILE
    if (path / INDEX).exists():
        return _read_indexed_files(path / INDEX, item_sizes), path / INDEX
    if int8 is not None and int8.format == MODELSLIM:
        indices, files = sorted(path.glob(f"{MODELSLIM_WEIGHTS}.index.json")), sorted(path.glob(MODELSLIM_WEIGHTS))
        if len(indices) == 1:
            return _read_indexed_files(indices[0], item_sizes), indices[0]
        if len(files) == 1 and not indices:
            return read_headers(files[0], item_sizes), files[0]
        raise no_weights_error(path, f"one file {MODELSLIM_WEIGHTS}, or one index of such files")
    raise no_weights_error(path, f"{SINGLE_FILE}, or {INDEX} and its shards")


def _read_indexed_files(index: Path, item_sizes: Mapping[str, int]) -> dict[str, Header]:
    """The header of each tensor by name, from the files that an index lists."""
    path = index.parent
    weight_map = read_json_object(index, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: weight_map is {shown(weight_map)}, expected tensor names with file names")
    headers_by_file: dict[str, dict[str, Header]] = {}
    for name, file in weight_map.items():
        check_name(index, name)
        is_name = isinstance(file, str) and Path(file).name == file and "\0" not in file
        if not is_name or not file.endswith(".safetensors"):
            raise CheckpointError(f"{index}: tensor {name}: {shown(file)} is not the name of a .safetensors file")
        if file not in headers_by_file:
            try:
                (path / file).stat()
            except OSError as error:
                missing = isinstance(error, FileNotFoundError)
                problem = "does not exist" if missing else f"cannot be opened ({error.strerror})"
                message = f"names the shard {shown(file)}, which {problem}"
                raise CheckpointError(f"{index}: tensor {name}: {message}") from error
            headers_by_file[file] = read_headers(path / file, item_sizes)
        if name not in headers_by_file[file]:
            raise CheckpointError(f"{index}: tensor {name}: is not in {file}, where the index expects it")
    for file, headers in headers_by_file.items():
        for name in headers:
            if weight_map.get(name) != file:
                raise CheckpointError(f"{path / file}: tensor {name}: the index does not expect it in this shard")
    return {name: headers_by_file[file][name] for name, file in weight_map.items()}


def _check_tensors(model_type: str, expected: Tensors, headers: dict[str, Header], source: Path) -> None:
    """Compares the tensors that ``source`` lists with the model's."""
    shapes = {name: spec.shape for name, spec in expected.specs.items()}
    for name, shape in shapes.items():
        if name not in headers:
            raise CheckpointError(f"{source}: tensor {name}: is missing, expected {list(shape)} for {model_type}")
    # transformers sometimes writes a head that is tied to the embedding too.
    shapes |= {name: shapes[original] for name, original in expected.copies.items()}
    for name, header in headers.items():
        if name not in shapes:
            raise CheckpointError(
                f"{header.file}: tensor {name}: is not part of a {model_type} model of this config.json"
            )
        if header.shape != shapes[name]:
            found = f"has shape {list(header.shape)}, expected {list(shapes[name])} for {model_type}"
            raise CheckpointError(f"{header.file}: tensor {name}: {found}")


def _choose_dtype(path: Path, raw: Mapping[str, Any], config: ModelConfig, headers: list[Header]) -> str:
    """The dtype in config.json, or without one that of most bytes of the model."""
    if not (raw.get("torch_dtype") or raw.get("dtype")):
        num_bytes: Counter[str] = Counter()
        for header in headers:
            if header.dtype in _DTYPE_NAMES:  # int8 weights have another one than the model
                num_bytes[_DTYPE_NAMES[header.dtype]] += header.num_bytes
        return max(num_bytes, key=lambda name: num_bytes[name])
    if config.dtype not in DTYPES:
        name = "torch_dtype" if raw.get("torch_dtype") else "dtype"
        raise CheckpointError(
            f"{path / 'config.json'}: {name} is {shown(config.dtype)}, expected {' or '.join(DTYPES)}"
        )
    return config.dtype
