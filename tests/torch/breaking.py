"""Ways to break the directory of a model, and the names of what is in it; the tables of cases are made of them."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.tiny import SPECIAL, VOCAB_SIZE, write_dream

CONFIG, GENERATION, SINGLE = "config.json", "generation_config.json", "model.safetensors"
INDEX, SHARD = "model.safetensors.index.json", "model-00001-of-00002.safetensors"
TOKENIZER, VOCAB, MERGES = "tokenizer_config.json", "vocab.json", "merges.txt"
ADAPTER, DELTA = "adapter/adapter_config.json", "adapter/adapter_model.safetensors"
MASK, EOS = VOCAB_SIZE - 1, VOCAB_SIZE - len(SPECIAL)
EMBEDDING, HEAD, UP = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight"
LORA_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
MANY = "x" * 100_000
DEEP = b'{"a": ' * 100_000

Change = Callable[[Path], object]


def fields(file: str, **changes: Any) -> Change:
    """Sets fields of a JSON object; ... removes one."""

    def change(path: Path) -> None:
        values = json.loads((path / file).read_text()) if (path / file).exists() else {}
        values |= changes
        (path / file).write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))

    return change


def content(file: str, raw: bytes) -> Change:
    return lambda path: (path / file).write_bytes(raw)


def fifo(file: str) -> Change:
    def change(path: Path) -> None:
        (path / file).unlink(missing_ok=True)
        os.mkfifo(path / file)

    return change


def folder(file: str) -> Change:
    def change(path: Path) -> None:
        (path / file).unlink(missing_ok=True)
        (path / file).mkdir()

    return change


def huge(file: str) -> Change:
    """A file of 64 GiB, all of it a hole."""

    def change(path: Path) -> None:
        (path / file).touch()
        os.truncate(path / file, 2**36)

    return change


def header(change_entries: Callable[[dict[str, Any]], object] | None = None, *, raw: bytes | None = None) -> Change:
    """Changes the entries of the header of model.safetensors, or replaces its text."""

    def change(path: Path) -> None:
        data = (path / SINGLE).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        new = raw
        if new is None:
            entries = json.loads(data[8 : 8 + length])
            assert change_entries is not None
            change_entries(entries)
            new = json.dumps(entries).encode()
        (path / SINGLE).write_bytes(struct.pack("<Q", len(new)) + new + data[8 + length :])

    return change


def entry(**changes: Any) -> Change:
    """Changes the entry of the embedding in the header of model.safetensors."""
    return header(lambda entries: entries[EMBEDDING].update(changes))


def values(file: str, name: str, value: float) -> Change:
    """Sets the last value of a tensor."""

    def change(path: Path) -> None:
        tensors = load_file(path / file)
        tensors[name].view(-1)[-1] = value
        save_file(tensors, path / file)

    return change


def both(*changes: Change) -> Change:
    return lambda path: [change(path) for change in changes]


def tied(scale: float) -> Change:
    """Ties the head to the embedding, and stores it as ``scale`` times the embedding."""

    def change(path: Path) -> None:
        tensors = load_file(path / SINGLE)
        tensors[HEAD] = tensors[EMBEDDING] * scale
        save_file(tensors, path / SINGLE)

    return both(fields(CONFIG, tie_word_embeddings=True), change)


def split(path: Path) -> None:
    """Two shards and their index in place of one file."""
    (path / SINGLE).unlink()
    write_dream(path, shards=2)


def index(change_map: Callable[[dict[str, Any]], object]) -> Change:
    def change(path: Path) -> None:
        split(path)
        whole = json.loads((path / INDEX).read_text())
        change_map(whole["weight_map"])
        (path / INDEX).write_text(json.dumps(whole))

    return change


def vocabulary(change_vocab: Callable[[dict[str, int]], object]) -> Change:
    def change(path: Path) -> None:
        vocab = json.loads((path / VOCAB).read_text())
        change_vocab(vocab)
        (path / VOCAB).write_text(json.dumps(vocab))

    return change


def tokenizer_json(change_values: Callable[[dict[str, Any]], object]) -> Change:
    def change(path: Path) -> None:
        from lopa_ascend.text.tokenizer_files import load_vocabulary

        tokenizer = load_vocabulary(path, VOCAB_SIZE)
        assert tokenizer is not None
        values = json.loads(tokenizer._backend.to_str())
        change_values(values)
        (path / "tokenizer.json").write_text(json.dumps(values))

    return change


def rope(**parameters: Any) -> Change:
    return fields(CONFIG, rope_parameters={"rope_type": "default", **parameters})


def declared(token_id: int = MASK, **changes: Any) -> Change:
    """Changes what added_tokens_decoder says of a token."""

    def change(path: Path) -> None:
        config = json.loads((path / TOKENIZER).read_text())
        config["added_tokens_decoder"][str(token_id)] |= changes
        (path / TOKENIZER).write_text(json.dumps(config))

    return change


def template(text: Any) -> Change:
    return fields(TOKENIZER, chat_template=text)
