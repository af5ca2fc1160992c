"""A family of another package is a table: Kestrel, SDAR under other names, does all that SDAR does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from examples.kestrel.kestrel import FAMILY
from lopa_ascend import LLM, checkpoint, register_family
from lopa_ascend.backend.compiler import Eager
from lopa_ascend.checkpoint import CheckpointError, open_adapter, open_checkpoint
from lopa_ascend.checkpoint.write import write_quantized
from lopa_ascend.config import ConfigError
from lopa_ascend.config.engine import INT8_LAYERS
from lopa_ascend.families import FAMILIES, Family, family_in, registry, sdar
from lopa_ascend.families.table import HEAD, Shard
from lopa_ascend.graph import setup
from lopa_ascend.model.decoder import Decoder
from lopa_ascend.model.registry import register_model
from tests.kestrel import as_kestrel, registered

MODEL = Path(__file__).parents[1] / "data" / "golden" / "models" / "sdar" / "model_a"
PROMPT = [5, 3, 8, 2, 9, 4]


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    with registered():
        yield as_kestrel(MODEL, tmp_path / "kestrel")


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in left)


def load(path: Path, family: Family = FAMILY, **options: Any) -> dict[str, Tensor]:
    found = open_checkpoint(path, family)
    layers = found.expected.quantized(options.pop("int8", ()))
    return checkpoint.load(found, layers=layers, **options)[1]


def answer(path: Path, **options: Any) -> tuple[tuple[int, ...], LLM]:
    llm = LLM(path, **options)
    params = llm.params(max_new_tokens=16, ignore_eos=True)
    assert (params.decoding, params.block_size) == ("d2f", 4)
    return tuple(llm.generate([PROMPT], params, quiet=True)[0].token_ids), llm


@pytest.mark.parametrize(
    "options", [{}, {"quantization": "w8a8"}, {"graph_mode": "inductor", "max_num_seqs": 1, "graph_window_blocks": 2}]
)
def test_it_decodes_as_sdar(path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "load_compiler", lambda *_, **__: Eager())
    tokens, llm = answer(path, **options)
    assert tokens == answer(MODEL, **options)[0]
    graphs = llm.engine.stats().graphs
    assert "graph_mode" not in options or (graphs is not None and graphs.num_steps > 0)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_it_is_split_and_quantised(path: Path, tmp_path: Path, size: int) -> None:
    for rank in range(size):
        for int8 in ((), INT8_LAYERS):
            options: dict[str, Any] = {"shard": Shard(rank, size), "int8": int8}
            expected, found = load(MODEL, sdar.FAMILY, **options), load(path, **options)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], x) for name, x in expected.items())
    written = write_quantized(path, tmp_path / "int8", FAMILY, linears=INT8_LAYERS)
    assert json.loads((written / "config.json").read_text())["quantization_config"]["ignore"] == ["head"]
    assert same(load(written), load(path, int8=INT8_LAYERS))


def test_an_adapter_changes_all_linear_layers_but_the_head(path: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": "all-linear"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    expected = open_checkpoint(path, FAMILY).expected
    tensors: dict[str, Tensor] = {}
    for module, spec in expected.linears.items():
        if spec.row.linear != HEAD:
            tensors[f"base_model.model.{module}.lora_A.weight"] = torch.ones(2, spec.shape[1])
            tensors[f"base_model.model.{module}.lora_B.weight"] = torch.ones(spec.shape[0], 2)
    save_file(tensors, str(adapter / "adapter_model.safetensors"))
    assert len(open_adapter(adapter, expected).deltas) == 3 * 7
    merged, plain = load(path, lora=str(adapter)), load(path)
    assert merged.keys() == plain.keys()
    changed = {name.rpartition(".")[0].split(".")[-1] for name in plain if not torch.equal(merged[name], plain[name])}
    assert changed == {"qkv", "o", "gate_up", "down"}


def test_what_is_missing_is_named(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: model_type is 'Kestrel', expected 'sdar'"):
        open_checkpoint(path, sdar.FAMILY)
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | {"depth": 9}))
    with pytest.raises(CheckpointError, match=r"tensor layers\.3\.norm_1\.weight: is missing.*for Kestrel"):
        open_checkpoint(path, FAMILY)


# ---- a forward pass of its own ---------------------------------------------------------------------------------------


class Reversed(Decoder):
    """Prefers what Kestrel does not."""

    def logits(self, hidden: Tensor) -> Tensor:
        return -super().logits(hidden)


def test_a_family_may_have_its_own_forward_pass(tmp_path: Path) -> None:
    path = as_kestrel(MODEL, tmp_path / "kestrel")
    with registered(replace(FAMILY, decoder=f"{__name__}:Reversed")):
        tokens, llm = answer(path)
        assert isinstance(llm.engine.runner.model, Reversed)
        assert tokens != answer(MODEL)[0]
    with registered(replace(FAMILY, decoder="no.such:Decoder")):
        with pytest.raises(ConfigError, match=r"family 'Kestrel': decoder 'no\.such:Decoder' cannot be imported: No"):
            LLM(path)


# ---- registering -----------------------------------------------------------------------------------------------------


def test_names_are_taken_once() -> None:
    with registered():
        register_family(FAMILY)
        for other, taken in (
            (replace(FAMILY, table=sdar.TABLE), "family 'Kestrel'"),
            (replace(FAMILY, name="Other"), "model_type 'Kestrel'"),
            (replace(FAMILY, name="sdar"), "family 'sdar'"),
        ):
            with pytest.raises(ValueError, match=f"{taken} is registered already"):
                register_family(other)
        with pytest.raises(ValueError, match="model_type 'Kestrel' is registered already"):
            register_model("Kestrel", torch.nn.Module)


def test_families_of_one_model_type_are_told_apart_by_what_they_claim() -> None:
    other = replace(FAMILY, name="Kestrel 2", claims=lambda config: config.get("version") == 2)
    with registered(), registered(other):
        found = [family_in({"model_type": "Kestrel", "version": version}) for version in (None, 1, 2)]
    assert found == [FAMILY, FAMILY, other]
    assert "Kestrel" not in FAMILIES


@pytest.mark.parametrize(
    ("value", "reason"), [("no_such_module:FAMILY", "No module"), ("json:dumps", "expected a .*Family, got function")]
)
def test_an_entry_point_that_cannot_be_loaded_is_named(
    value: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_installed", lambda: (EntryPoint("Broken", value, registry.GROUP),))
    assert family_in({"model_type": "sdar"}) is sdar.FAMILY
    with pytest.raises(ConfigError, match=f"model_type 'Broken': entry point '{value}' cannot be loaded: {reason}"):
        family_in({"model_type": "Broken"})
