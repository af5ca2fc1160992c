"""Dream against transformers' Qwen2 with the matching mask, fp32, on random configurations."""

from __future__ import annotations

import random

import pytest
import torch

from lopa_ascend import DecodingParams
from lopa_ascend.backend.cpu.ops import CpuOps
from lopa_ascend.core import Request, Sequence
from lopa_ascend.decode import begin
from lopa_ascend.decode.strategy import SequenceStart
from lopa_ascend.families import dream
from lopa_ascend.kv.pages import PageTables, pages_for
from lopa_ascend.kv.pool import KVPool
from lopa_ascend.model.decoder import Decoder, tied_head
from lopa_ascend.parallel.collectives import Group
from lopa_ascend.runner.eager import EagerExecutor
from lopa_ascend.types import RowPlan, Scoring, SequencePlan
from tests import reference
from tests.dream_checkpoint import load
from tests.tiny import write_dream
from tests.versions import qwen2_knows_head_dim

BLOCK = 8


class Recorder(Decoder):
    """Dream that keeps the last hidden states it gave."""

    hidden: torch.Tensor

    def forward(self, *args):
        self.hidden = super().forward(*args)
        return self.hidden


def forward(model: Decoder, plan: SequencePlan) -> None:
    """One forward pass of one row on pages of its own."""
    end = plan.rows[0].end
    pool = KVPool(model.config.kv_shape(), pages_for(end), torch.float32, "cpu")
    executor = EagerExecutor(model, pool, model.ops)
    params, mask = DecodingParams(decoding="d2f"), model.config.mask_token_id
    strategy, scoring = (
        begin(SequenceStart([1], params, mask, frozenset())),
        Scoring("max_prob", mask, model.config.vocab_size),
    )
    sequence = Sequence(Request("one", (1,), params), strategy, scoring, PageTables(pool.allocator, 1))
    sequence.page_tables.grow(0, end)
    executor.forward([sequence], [executor.placement.share(plan)])


def random_config(rng: random.Random) -> dict:
    kv_heads = rng.choice([1, 2, 4])
    return {
        "hidden": 16 * rng.choice([2, 3, 5]),
        "intermediate": rng.choice([24, 80]),
        "layers": rng.choice([1, 2, 4]),
        "heads": kv_heads * rng.choice([1, 2, 3]),
        "kv_heads": kv_heads,
        "head_dim": rng.choice([8, 16]),
        "tie": rng.random() < 0.5,
        "rope_theta": rng.choice([1e4, 1e6]),
        "rms_norm_eps": rng.choice([1e-6, 1e-5]),
        "scale": 0.15,
    }


class OpsOfRows(CpuOps):
    """Ops that take no empty tensor, as some kernels of an NPU."""

    def linear(self, x, weight, bias=None):
        assert len(x)
        return super().linear(x, weight, bias)

    def add_rms_norm(self, x, residual, weight, eps):
        assert len(x)
        return super().add_rms_norm(x, residual, weight, eps)


def test_a_step_of_which_no_hidden_state_is_wanted(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a branch-parallel group that has no branch in the first pass of a block of Fast-dLLM."""
    write_dream(tmp_path)
    model = Recorder(dream.FAMILY, *load(tmp_path, dtype="float32"), OpsOfRows())
    monkeypatch.setattr(model, "logits", lambda hidden: hidden.new_zeros(len(hidden), model.config.vocab_size))
    row = RowPlan(0, tuple(range(16)), 0, (16,), ())
    forward(model, SequencePlan(0, 0, (row,), 1, winner_commits=False, prefix_length=0))
    assert model.hidden.shape == (0, model.config.hidden_size)


@qwen2_knows_head_dim
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_logits_are_those_of_qwen2(seed: int, full: bool, tmp_path) -> None:
    rng = random.Random(seed)
    write_dream(tmp_path, seed=seed, **random_config(rng))
    config, weights = load(tmp_path, dtype="float32")
    ops = CpuOps()
    model = Recorder(dream.FAMILY, config, weights, ops)
    prompt, blocks = rng.randrange(2, 140), rng.randrange(1, 4)
    end = prompt + blocks * BLOCK
    tokens = [rng.randrange(config.vocab_size - 1) for _ in range(end)]
    masked = tuple(range(prompt, end))
    edges = (end,) if full else (prompt, *range(prompt + BLOCK, end + 1, BLOCK))
    row = RowPlan(0, tuple(tokens), 0, edges, masked)
    forward(model, SequencePlan(0, prompt, (row,), 1, winner_commits=full, prefix_length=prompt))
    ours = model.logits(model.hidden[: len(masked)])

    owner = torch.tensor([0] * prompt + [1 + i // BLOCK for i in range(blocks * BLOCK)])
    sees = torch.ones(end, end, dtype=torch.bool) if full else owner[:, None] >= owner[None, :]
    bias = torch.zeros(1, 1, end, end).masked_fill(~sees, torch.finfo(torch.float32).min)
    with torch.no_grad():
        theirs = reference.load(tmp_path)(torch.tensor([tokens]), attention_mask=bias).logits[0]
    theirs = theirs[prompt - 1 : end - 1]
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-5


def test_without_biases(tmp_path) -> None:
    """Qwen2 has no switch for its biases: zero ones are the same model."""
    write_dream(tmp_path / "without", bias=False)
    _, weights = load(tmp_path / "without")
    assert not any(name.endswith("bias") for name in weights)
    write_dream(tmp_path / "with", bias=True)
    config, biased = load(tmp_path / "with")
    zero = {k: torch.zeros_like(v) if k.endswith("bias") else v for k, v in biased.items()}
    same = {k: v for k, v in biased.items() if not k.endswith("bias")}
    outputs = []
    for some in (zero, same):
        model = Recorder(dream.FAMILY, config, some, CpuOps())
        forward(model, SequencePlan(0, 4, (RowPlan(0, (1, 2, 3, 4, 5, 6), 0, (4, 6), (4, 5)),), 1, False, 4))
        outputs.append(model.hidden)
    torch.testing.assert_close(outputs[0], outputs[1])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_ranks_parts_of_a_tied_head_are_the_embedding_and_rows_of_zeros(size: int) -> None:
    embed = torch.randn(10, 4)
    shard = -(-10 // size)
    parts = [tied_head(embed, Group(rank, size), shard) for rank in range(size)]
    assert all(part.shape == (shard, 4) for part in parts)
    joined = torch.cat(parts)
    assert torch.equal(joined[:10], embed)
    assert not joined[10:].any()
    assert parts[0].data_ptr() == embed.data_ptr(), "a whole part is a view of the embedding"
