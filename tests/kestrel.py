"""The example of a family of another package, and checkpoints of it: those of SDAR under other names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file, save_file

from examples.kestrel.kestrel import FAMILY
from lopa_ascend.families import FAMILIES, Family, register_family

TENSORS = {
    "model.embed_tokens": "embed",
    "model.": "",
    "lm_head": "head",
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2",
    "self_attn.": "",
    "mlp.": "",
    "_proj": "",
}
"""What Kestrel calls the tensors of SDAR."""


def renamed(name: str) -> str:
    for theirs, own in TENSORS.items():
        name = name.replace(theirs, own)
    return name


def as_kestrel(sdar: Path, target: Path) -> Path:
    """Writes the Kestrel with the weights of an SDAR."""
    target.mkdir(parents=True)
    for file in sdar.iterdir():
        if file.name == "config.json":
            values = json.loads(file.read_text("utf-8")) | {"model_type": FAMILY.model_type}
            values = {FAMILY.names.get(name, name): value for name, value in values.items()}
            (target / file.name).write_text(json.dumps(values), "utf-8")
        elif file.suffix == ".safetensors":
            save_file({renamed(name): x for name, x in load_file(str(file)).items()}, str(target / file.name))
        elif file.is_file():
            (target / file.name).symlink_to(file.resolve())
    return target


@contextmanager
def registered(family: Family = FAMILY) -> Iterator[None]:
    """Registers a family meanwhile."""
    register_family(family)
    try:
        yield
    finally:
        del FAMILIES[family.name]
