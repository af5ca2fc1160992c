"""A Hugging Face Dream directory: everything is checked from JSON and headers, then weights stream one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from lopa_ascend.checkpoint.files import CheckpointError, Header, check_directory, no_weights, read_headers
from lopa_ascend.config import ConfigError, ModelConfig
from lopa_ascend.config.files import read_json_object

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HEAD = "lm_head.weight"


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Dream checkpoint and its shape, in layer order."""
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        rows = {"self_attn.q_proj": q_rows, "self_attn.k_proj": kv_rows, "self_attn.v_proj": kv_rows}
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes |= {f"{prefix}{name}.weight": (count, hidden) for name, count in rows.items()}
        if config.attention_bias:
            shapes |= {f"{prefix}{name}.bias": (count,) for name, count in rows.items()}
        shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, q_rows)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[_HEAD] = (vocab, hidden)
    return shapes


def map_tensor(file: Path, name: str) -> torch.Tensor:
    """A tensor as stored: a view of its file, of which only what is used is read.

    Pages that were used count as memory of this process. The file is mapped for each tensor anew, so they go with it.
    """
    with safe_open(str(file), framework="pt") as handle:
        tensor: torch.Tensor = handle.get_tensor(name)
    return tensor


@dataclass(frozen=True)
class Checkpoint:
    """A directory that passed every check. ``files`` says where each tensor is, in layer order."""

    path: Path
    config: ModelConfig
    files: Mapping[str, Path]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under their Hugging Face names in layer order, one at a time, as `map_tensor` gives them."""
        for name, file in self.files.items():
            yield name, map_tensor(file, name)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Checks a Dream directory without reading a weight.

    The config's ``dtype`` is what config.json says, or where it says nothing what most of the weights are stored in.

    Raises:
        CheckpointError: something is missing, malformed or does not fit; nothing was loaded.
    """
    path = Path(path)
    check_directory(path)
    raw = read_json_object(path / "config.json", CheckpointError)
    generation = read_json_object(path / "generation_config.json", CheckpointError, optional=True)
    try:
        config = ModelConfig.from_json(raw, generation, str(path / "config.json"))
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    headers, source = _find_tensors(path)
    shapes = expected_shapes(config)
    _check_tensors(config, shapes, headers, source)
    config = replace(config, dtype=_own_dtype(path, raw, config, [headers[name] for name in shapes]))
    return Checkpoint(path, config, {name: headers[name].file for name in shapes})


def _find_tensors(path: Path) -> tuple[dict[str, Header], Path]:
    """The headers of all weight files, and the file that lists the tensors."""
    if (path / _SINGLE).exists():
        return read_headers(path / _SINGLE), path / _SINGLE
    if (path / _INDEX).exists():
        return _read_shards(path), path / _INDEX
    raise no_weights(path, f"{_SINGLE}, or {_INDEX} and its shards")


def _read_shards(path: Path) -> dict[str, Header]:
    index = path / _INDEX
    weight_map = read_json_object(index, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: weight_map is {weight_map!r}, expected tensor names with file names")
    shards: dict[str, dict[str, Header]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{index}: tensor {name}: {shard!r} is not the name of a .safetensors file")
        if shard not in shards:
            if not (path / shard).exists():
                raise CheckpointError(f"{index}: tensor {name}: names the shard {shard}, which does not exist")
            shards[shard] = read_headers(path / shard)
        if name not in shards[shard]:
            raise CheckpointError(f"{index}: tensor {name}: is not in {shard}, where the index expects it")
    for shard, headers in shards.items():
        for name in headers:
            if weight_map.get(name) != shard:
                raise CheckpointError(f"{path / shard}: tensor {name}: the index does not expect it in this shard")
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def _check_tensors(
    config: ModelConfig, shapes: dict[str, tuple[int, ...]], headers: dict[str, Header], source: Path
) -> None:
    for name, shape in shapes.items():
        if name not in headers:
            raise CheckpointError(f"{source}: tensor {name}: is missing, expected {list(shape)}")
    # transformers sometimes writes the tied head too.
    known = shapes | ({_HEAD: shapes["model.embed_tokens.weight"]} if config.tie_word_embeddings else {})
    for name, header in headers.items():
        if name not in known:
            raise CheckpointError(f"{header.file}: tensor {name}: is not part of a Dream model of this config.json")
        if header.shape != known[name]:
            found, wanted = list(header.shape), list(known[name])
            raise CheckpointError(f"{header.file}: tensor {name}: has shape {found}, expected {wanted}")


def _own_dtype(path: Path, raw: Mapping[str, Any], config: ModelConfig, headers: list[Header]) -> str:
    if not (raw.get("torch_dtype") or raw.get("dtype")):
        sizes: Counter[str] = Counter()
        for header in headers:
            sizes[_STORED[header.dtype]] += header.num_bytes
        return max(sizes, key=lambda name: sizes[name])
    if config.dtype not in DTYPES:
        field = "torch_dtype" if raw.get("torch_dtype") else "dtype"
        raise CheckpointError(f"{path / 'config.json'}: {field} is {config.dtype!r}, expected {' or '.join(DTYPES)}")
    return config.dtype
