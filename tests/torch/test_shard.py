"""What a tensor-parallel rank loads: its part of every weight, also with an adapter, in little more memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lopa_ascend.checkpoint import Shard
from lopa_ascend.config import ModelConfig
from tests.dream_checkpoint import load
from tests.tiers import slow_but
from tests.tiny import dream_shapes, write_dream

MB = 1_000_000


@pytest.fixture
def _nan_memory() -> Iterator[None]:
    """New memory is filled with NaN, so that values which were never written are not zero by chance."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def part(name: str, whole: torch.Tensor, config: ModelConfig, shard: Shard) -> torch.Tensor:
    """The rank's part of a stacked tensor, derived from its heads."""
    rank, size = shard.rank, shard.size
    match name.split(".")[-2]:
        case "qkv":
            queries = torch.arange(config.num_heads).chunk(size)[rank]
            keys = (queries * config.num_kv_heads // config.num_heads).unique() + config.num_heads
            heads = whole.unflatten(0, (-1, config.head_dim))
            return heads[torch.cat([queries, keys, keys + config.num_kv_heads])].flatten(0, 1)
        case "gate_up":
            return whole.unflatten(0, (2, -1)).chunk(size, dim=1)[rank].flatten(0, 1)
        case "o" | "down":
            return whole.chunk(size, dim=1)[rank]
        case "head":
            padding = whole.new_zeros((-len(whole) % size, config.hidden_size))
            return torch.cat([whole, padding]).chunk(size)[rank]
    assert "norm" in name or name == "embed.weight"
    return whole


@pytest.mark.usefixtures("_nan_memory")
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},  # 2 KV heads: at size 4 two ranks hold the same one
        {"vocab_size": 321, "heads": 8, "kv_heads": 4, "shards": 3},
        {"tie": True, "bias": False, "vocab_size": 331, "head_dim": 16, "kv_heads": 1},
    ],
)
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_each_rank_holds_its_part(tmp_path: Path, options: dict[str, Any], dtype: str, size: int) -> None:
    path = write_dream(tmp_path, **options)
    config, whole = load(path, dtype=dtype)
    for rank in range(size):
        same_config, weights = load(path, dtype=dtype, shard=Shard(rank, size))
        assert same_config == config
        assert weights.keys() == whole.keys()
        for name, tensor in weights.items():
            expected = part(name, whole[name], config, Shard(rank, size))
            assert tensor.dtype == expected.dtype
            assert torch.equal(tensor, expected), (name, rank)


def write_adapter(path: Path, model: Path, rank: int = 3) -> Path:
    """A random adapter of every linear layer of a model that is not tied."""
    path.mkdir()
    shapes = dream_shapes(json.loads((model / "config.json").read_text()))
    linears = [name for name in shapes if name.endswith(("_proj.weight", "lm_head.weight"))]
    targets = sorted({name.split(".")[-2] for name in linears})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "target_modules": targets}
    (path / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name in linears:
        (rows, columns), module = shapes[name], f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = torch.randn((rank, columns), generator=generator)
        tensors[f"{module}.lora_B.weight"] = torch.randn((rows, rank), generator=generator)
    save_file(tensors, str(path / "adapter_model.safetensors"))
    return path


@pytest.mark.parametrize("size", [2, 4])
def test_an_adapter_is_merged_into_each_part(tmp_path: Path, size: int) -> None:
    path = write_dream(tmp_path / "model", vocab_size=321)
    adapter = write_adapter(tmp_path / "adapter", path)
    config, whole = load(path, lora=adapter)
    for rank in range(size):
        for name, tensor in load(path, lora=adapter, shard=Shard(rank, size))[1].items():
            # The order of sums in a matrix product may depend on its size.
            expected = part(name, whole[name], config, Shard(rank, size))
            torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-5)


def test_a_size_that_splits_no_head_is_refused(tmp_path: Path) -> None:
    path = write_dream(tmp_path)
    with pytest.raises(ValueError, match="shard: 3 ranks cannot split this model; choose one of 1, 2, 4"):
        load(path, shard=Shard(0, 3))


MEASURE = """
import sys
from pathlib import Path
from lopa_ascend.checkpoint import Shard
from tests.dream_checkpoint import load

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

model, small, adapter, small_adapter, size = sys.argv[1:]
load(small, lora=small_adapter or None)
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
before = status("VmRSS")
weights = load(model, lora=adapter or None, shard=Shard(int(size) - 1, int(size)))[1]
print(status("VmHWM") - before, sum(tensor.nbytes for tensor in weights.values()))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Models ``large`` (235 MB in one file, of which the head is 34 MB) and ``small``, with adapters."""
    path = tmp_path_factory.mktemp("models")
    write_dream(path / "large", vocab_size=16384, hidden=512, intermediate=2048, layers=10, heads=8, kv_heads=4)
    write_dream(path / "small")
    for name in ("large", "small"):
        write_adapter(path / f"{name}-adapter", path / name)
    yield path
    shutil.rmtree(path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
@pytest.mark.parametrize(("size", "lora"), slow_but([(1, False), (4, False), (4, True)], [(4, True)]))
def test_peak_memory_is_the_part_and_one_tensor(models: Path, size: int, lora: bool) -> None:
    adapters = [models / "large-adapter", models / "small-adapter"] if lora else ["", ""]
    run = [sys.executable, "-c", MEASURE, models / "large", models / "small", *adapters, str(size)]
    output = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    grown, held = map(int, output.split())
    whole = (models / "large" / "model.safetensors").stat().st_size
    embedding = 16384 * 512 * 4  # whole on every rank, and as large as the head
    assert held < (whole - embedding) / size + embedding + 1 * MB
    assert grown < held + embedding + 10 * MB, f"{grown / MB:.0f} MB for {held / MB:.0f} MB of weights"
