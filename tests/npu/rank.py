"""One rank of test_parallel.py: python -m tests.npu.lab --numeric tests.npu.rank FILE, with torchrun's variables.

A Dream with its scores runs on the simulated device, as torchair's FX graph after its passes. What it has found is
written to FILE.RANK.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lopa_ascend.backend.cpu.ops import CpuOps
from lopa_ascend.backend.interface import Ops
from lopa_ascend.backend.npu.ops import NpuOps
from lopa_ascend.config import ModelConfig
from lopa_ascend.families import dream
from lopa_ascend.kv.pages import PAGE_SIZE
from lopa_ascend.model.base import ForwardInputs
from lopa_ascend.model.decoder import Decoder
from lopa_ascend.parallel.collectives import ALONE, Group
from lopa_ascend.parallel.launch import LOOPBACK
from lopa_ascend.score.greedy import GreedyScore
from scripts.selftest.findings import examine
from tests.npu.cases import paged_entries
from tests.npu.exchanges import collectives_case
from tests.npu.lab import capture, collectives, device  # noqa: F401
from tests.npu.lab.lowering import optimised
from tests.npu.lab.traffic import host_traffic
from tests.npu.samples import SMALL_VOCABULARY, dream_config, dream_weights, forward_inputs, moved

STEPS = 3
NUM_TOKENS = SMALL_VOCABULARY - 5
BLOCKS, KV_LENGTHS = (32,) * 3, (600, 40, 130)


def config_of_two() -> ModelConfig:
    """That two ranks can split."""
    return dream_config(2, hidden=256, intermediate=320, heads=8, kv_heads=2)


def part(config: ModelConfig, name: str, weight: Tensor, group: Group) -> Tensor:
    """A rank's of a packed weight."""

    def own(x: Tensor, dim: int = 0) -> Tensor:
        return x.chunk(group.size, dim)[group.rank]

    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if ".qkv." in name:
        return torch.cat([own(x) for x in weight.split([heads, kv_heads, kv_heads])])
    if ".gate_up." in name:
        return torch.cat([own(x) for x in weight.chunk(2)])
    if ".o." in name or ".down." in name:
        return own(weight, 1)
    return own(weight) if name == "head.weight" else weight


class Sample:
    """The same model and inputs on every rank, float32. ``step`` gives the tokens and their probabilities."""

    def __init__(self, ops: Ops, group: Group) -> None:
        torch.manual_seed(0)
        config = config_of_two()
        weights = dream_weights(config, torch.float32)
        own = {name: part(config, name, weight, group).to(ops.device) for name, weight in weights.items()}
        self.model = Decoder(dream.FAMILY, config, own, ops, group)
        first = self.model.first_token_id
        ids = range(first, first + self.model.local_vocab_size)
        self.score = GreedyScore(ids, config.mask_token_id, NUM_TOKENS, group, ops)
        self.device = str(ops.device)
        _, self.num_pages = paged_entries(BLOCKS, KV_LENGTHS)
        shape = (2, config.num_layers, self.num_pages, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        self.caches = torch.randn(shape).chunk(group.size, 4)[group.rank].contiguous().to(ops.device)

    def inputs(self) -> Iterator[ForwardInputs]:
        for seed in range(STEPS):
            torch.manual_seed(seed)
            entries, _ = paged_entries(BLOCKS, KV_LENGTHS)
            yield moved(replace(forward_inputs(entries, self.num_pages), rows=None), self.device)

    def step(self, inputs: ForwardInputs, k_caches: list[Tensor], v_caches: list[Tensor]) -> tuple[Tensor, Tensor]:
        return self.score(self.model.logits(self.model.forward(inputs, k_caches, v_caches)))[:2]


def compiled(group: Group) -> dict[str, Any]:
    """Tokens and probabilities of some steps, and the collectives of each."""
    sample = Sample(NpuOps(), group)
    step, caches = optimised(sample.step), list(map(list, sample.caches))
    found: dict[str, Any] = {"tokens": [], "probs": [], "collectives": []}
    for inputs in sample.inputs():
        with host_traffic() as traffic:
            tokens, probs = step(inputs, *caches)
        found["collectives"].append([name for name in traffic.launches if name.startswith("lab::")])
        found["tokens"].append(tokens.tolist())
        found["probs"].append(probs.tolist())
    return found


def counted(group: Group) -> tuple[Any, Any]:
    """(what the ledger has counted in an eager step on the CPU, what the parts of the step say that they send)."""
    sample = Sample(CpuOps(), group)
    sample.step(next(sample.inputs()), *map(list, sample.caches))
    expected = [*sample.model.traffic(sum(BLOCKS)), *sample.score.traffic(sum(BLOCKS))]
    return [str(entry) for entry in group.ledger.traffic()], [str(entry) for entry in expected]


def main() -> None:
    group = ALONE
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        dist.init_process_group("gloo")
        group = Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    found = {**compiled(group), "traffic": counted(group)}
    if group.size > 1:
        found["captured"] = asdict(examine(collectives_case([group], torch.device("npu", 0)), repeats=1))
    Path(f"{sys.argv[1]}.{group.rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
