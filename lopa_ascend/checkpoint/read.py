"""Opens the Hugging Face directory of a model: checks its JSON and headers, then gives its weights one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lopa_ascend.checkpoint.files import (
    INTEGER_SIZES,
    ITEM_SIZES,
    CheckpointError,
    Header,
    check_directory,
    check_name,
    no_weights_error,
    read_headers,
)
from lopa_ascend.checkpoint.int8_formats import Int8Description, describe_int8
from lopa_ascend.checkpoint.int8_members import split_members
from lopa_ascend.config import DREAM, ConfigError, ModelConfig
from lopa_ascend.config.files import read_json_object, shown
from lopa_ascend.config.int8_files import MODELSLIM, MODELSLIM_WEIGHTS
from lopa_ascend.config.model import eos_ids

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""By the name of the dtype in config.json."""
_DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Name in a safetensors file -> name in a config."""
_SINGLE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor of a Dream checkpoint, in layer order."""
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    q_rows = config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * config.head_dim
    qkv_rows = {"self_attn.q_proj": q_rows, "self_attn.k_proj": kv_rows, "self_attn.v_proj": kv_rows}
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (vocab, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes |= {f"{prefix}{name}.weight": (rows, hidden) for name, rows in qkv_rows.items()}
        if config.attention_bias:
            shapes |= {f"{prefix}{name}.bias": (rows,) for name, rows in qkv_rows.items()}
        shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, q_rows)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[_HEAD] = (vocab, hidden)
    return shapes


@dataclass(frozen=True)
class ExpectedTensors:
    """The tensors that a checkpoint of an architecture must hold."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every tensor by its Hugging Face name, in the order in which they are loaded."""
    copies: Mapping[str, str]
    """Tied tensors: name -> name of the tensor with the same values. A checkpoint may leave them out."""
    linears: tuple[str, ...]
    """Names of the linear layers, which an adapter may change."""

    def linears_named(self, last_parts: Collection[str]) -> set[str]:
        """The linear layers whose names end with one of these parts, e.g. "q_proj"."""
        return {name for name in self.linears if name.rpartition(".")[2] in last_parts}


def dream_tensors(config: ModelConfig) -> ExpectedTensors:
    """The tensors of a Dream checkpoint."""
    shapes = expected_shapes(config)
    linears = [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2 and name != _EMBEDDING]
    copies = {_HEAD: _EMBEDDING} if config.tie_word_embeddings else {}
    return ExpectedTensors(shapes, copies, tuple(linears))


def map_tensor(file: Path, name: str) -> torch.Tensor:
    """A tensor as stored, mapped from its file: only the parts that are used are read.

    Parts that were used count as memory of this process. Every call maps the file anew, so that this memory is freed
    with the tensor.

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
    expected: ExpectedTensors
    files: Mapping[str, Path]
    """By Hugging Face name of a tensor, in the order of ``expected.shapes``: the file that holds it."""
    copies: Mapping[str, Path]
    """By name of a tied tensor that was stored although it has the values of another: the file that holds it."""
    doubts: tuple[str, ...]
    """What may be a mistake in the files, for warnings."""
    int8: Int8Description | None = None
    """Which linear layers are stored as int8; None if none is."""
    members: Mapping[str, Mapping[str, Path]] = field(default_factory=dict)
    """By name of an int8 layer: the files of its members by the last part of their names (see ``int8_members``)."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face names and tensors, in the order of ``files``, one at a time; see `map_tensor`."""
        for name, file in self.files.items():
            yield name, map_tensor(file, name)


def model_type(path: str | Path) -> object:
    """What config.json names as the architecture: text, unless the file is wrong; None if it names none.

    Raises:
        CheckpointError: the directory or the file is missing, or the file is no JSON object.
    """
    check_directory(Path(path))
    return read_json_object(Path(path) / "config.json", CheckpointError).get("model_type")


def open_checkpoint(
    path: str | Path,
    model_type: str = DREAM,
    expect: Callable[[ModelConfig], ExpectedTensors] = dream_tensors,
) -> Checkpoint:
    """Checks the directory of a model without reading a weight.

    ``config.dtype`` of the result is what config.json names, or if it names none, the dtype that most bytes are stored
    in.

    Args:
        path: the directory.
        model_type: the architecture that config.json must name.
        expect: gives the tensors that a checkpoint of that architecture must hold.

    Raises:
        CheckpointError: a file, field or tensor is missing, malformed, or does not fit the others.
    """
    path = Path(path)
    check_directory(path)
    raw = read_json_object(path / "config.json", CheckpointError)
    generation = read_json_object(path / "generation_config.json", CheckpointError, optional=True)
    try:
        config = ModelConfig.from_json(raw, generation, str(path / "config.json"), model_type)
        doubts = _eos_doubts(path, raw, generation, config)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    expected = expect(config)
    modules = [module for module in expected.linears if f"{module}.weight" != _HEAD]
    int8 = describe_int8(path, raw, modules) if model_type == DREAM else None
    headers, source = _find_tensors(path, int8)
    members = split_members(int8, expected.shapes, headers) if int8 else {}
    _check_tensors(model_type, expected, headers, source)
    config = replace(config, dtype=_choose_dtype(path, raw, config, [headers[name] for name in expected.shapes]))
    return Checkpoint(
        path,
        config,
        expected,
        files={name: headers[name].file for name in expected.shapes},
        copies={name: headers[name].file for name in expected.copies if name in headers},
        doubts=(*doubts, *_static_doubts(int8)),
        int8=int8,
        members={module: {part: header.file for part, header in parts.items()} for module, parts in members.items()},
    )


def _static_doubts(int8: Int8Description | None) -> tuple[str, ...]:
    """A warning if the checkpoint has scales of activations, which are not used; empty if it has none."""
    modules = int8.static() if int8 else []
    if not modules:
        return ()
    assert int8 is not None
    found = f"{int8.source}: has static scales for the activations of {', '.join(modules)}"
    return (f"{found}; they are not used: activations are quantised token by token when they run",)


def _eos_doubts(path: Path, raw: dict[str, Any], generation: dict[str, Any], config: ModelConfig) -> tuple[str, ...]:
    """A warning if config.json and generation_config.json both name EOS ids, but none in common; otherwise empty.

    It is no error: fine-tuned models often have a ``config.json`` that was left as it was.
    """
    in_config = eos_ids(raw, config.vocab_size, str(path / "config.json"))
    if not in_config or generation.get("eos_token_id") is None or {*in_config} & {*config.eos_token_ids}:
        return ()
    file, used = path / "generation_config.json", shown(generation["eos_token_id"])
    return (f"{file}: eos_token_id is {used}, and {shown(raw['eos_token_id'])} in config.json; the former is used",)


def _find_tensors(path: Path, int8: Int8Description | None) -> tuple[dict[str, Header], Path]:
    """The header of every tensor by name, and the file that lists the tensors."""
    item_sizes = ITEM_SIZES if int8 is None else ITEM_SIZES | INTEGER_SIZES
    if (path / _SINGLE_FILE).exists():
        return read_headers(path / _SINGLE_FILE, item_sizes), path / _SINGLE_FILE
    if (path / _INDEX).exists():
        return _read_indexed_files(path / _INDEX, item_sizes), path / _INDEX
    if int8 is not None and int8.format == MODELSLIM:
        indices, files = sorted(path.glob(f"{MODELSLIM_WEIGHTS}.index.json")), sorted(path.glob(MODELSLIM_WEIGHTS))
        if len(indices) == 1:
            return _read_indexed_files(indices[0], item_sizes), indices[0]
        if len(files) == 1 and not indices:
            return read_headers(files[0], item_sizes), files[0]
        raise no_weights_error(path, f"one file {MODELSLIM_WEIGHTS}, or one index of such files")
    raise no_weights_error(path, f"{_SINGLE_FILE}, or {_INDEX} and its shards")


def _read_indexed_files(index: Path, item_sizes: Mapping[str, int]) -> dict[str, Header]:
    """The header of every tensor by name, of weights in several files that an index lists.

    Args:
        index: the file of the index.
        item_sizes: bytes of one value of the dtypes that tensors may have.

    Raises:
        CheckpointError: the index and the files do not agree.
    """
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


def _check_tensors(model_type: str, expected: ExpectedTensors, headers: dict[str, Header], source: Path) -> None:
    """Compares the tensors that are there with those that the model needs.

    Args:
        model_type: the architecture, for messages.
        expected: the tensors that the model needs.
        headers: name and header of every tensor that is there.
        source: the file that lists the tensors, for messages.

    Raises:
        CheckpointError: a tensor is missing, unknown, or of another shape.
    """
    for name, shape in expected.shapes.items():
        if name not in headers:
            raise CheckpointError(f"{source}: tensor {name}: is missing, expected {list(shape)} for {model_type}")
    # transformers sometimes writes a head that is tied to the embedding too.
    shapes = {**expected.shapes, **{name: expected.shapes[other] for name, other in expected.copies.items()}}
    for name, header in headers.items():
        if name not in shapes:
            raise CheckpointError(
                f"{header.file}: tensor {name}: is not part of a {model_type} model of this config.json"
            )
        if header.shape != shapes[name]:
            found = f"has shape {list(header.shape)}, expected {list(shapes[name])} for {model_type}"
            raise CheckpointError(f"{header.file}: tensor {name}: {found}")


def _choose_dtype(path: Path, raw: Mapping[str, Any], config: ModelConfig, headers: list[Header]) -> str:
    """The dtype that config.json names, or if it names none, the one that most bytes are stored in.

    Args:
        path: the directory, for messages.
        raw: the fields of config.json.
        config: these fields as a ModelConfig, whose ``dtype`` is a default if config.json names none.
        headers: the headers of all tensors that the model needs.

    Raises:
        CheckpointError: config.json names an unknown dtype.
    """
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
