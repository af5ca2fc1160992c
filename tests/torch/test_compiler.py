"""A decode step through inductor, as ``tests/npu/test_compiler.py`` does through the compilers of NPUs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from lopa_ascend.backend.compiler import GraphError
from lopa_ascend.backend.cpu.ops import CpuOps
from lopa_ascend.backend.interface import Entries
from lopa_ascend.families import dream
from lopa_ascend.graph.compile import load_compiler
from lopa_ascend.kv.pages import PAGE_SIZE
from lopa_ascend.model.base import ForwardInputs
from lopa_ascend.model.decoder import Decoder
from tests.npu.samples import SMALL_VOCABULARY, dream_weights, small_dream
from tests.versions import compiles_steps

pytestmark = compiles_steps

LENGTH, PAGES, NUM_PAGES = 8, 4, 12


class Sample:
    """A model with caches, and a step over rows of one block each. Its last tensor is a state that it changes."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = small_dream(1)
        self.ops = CpuOps()
        self.model = Decoder(dream.FAMILY, config, dream_weights(config, torch.float32), self.ops)
        shape = (2, 1, NUM_PAGES, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        self.k_caches, self.v_caches = (list(x) for x in torch.randn(shape))

    def tensors(self, rows: int) -> list[Tensor]:
        count = rows * LENGTH
        page_tables = torch.stack([torch.randperm(NUM_PAGES)[:PAGES] for _ in range(rows)]).int()
        slot_mapping = torch.randperm(NUM_PAGES * PAGE_SIZE)[:count]
        tokens, positions = torch.randint(SMALL_VOCABULARY, (count,)), torch.randint(2048, (count,))
        return [tokens, positions, slot_mapping, page_tables, torch.zeros(3, count, dtype=torch.int32)]

    def step(self, tensors: Sequence[Tensor], kv_lengths: Sequence[int]) -> Tensor:
        tokens, positions, slot_mapping, page_tables, state = tensors
        rows = len(page_tables)
        entries = Entries((LENGTH,) * rows, tuple(kv_lengths), page_tables, tuple(range(rows)), (0,) * rows)
        inputs = ForwardInputs(tokens, positions, slot_mapping, None, entries, torch.arange(rows * LENGTH))
        best = self.model.logits(self.model.forward(inputs, self.k_caches, self.v_caches)).argmax(-1).int()
        self.ops.put_rows(state, torch.ones(1, dtype=torch.int32), best[None])
        return torch.cat([best, state.view(-1)])


@pytest.fixture(scope="module")
def sample() -> Sample:
    return Sample()


@pytest.mark.slow
def test_100_steps_of_two_buckets_compile_two_graphs(sample: Sample) -> None:
    compiler = load_compiler("cpu", "inductor", key="sample")
    graphs = counters["stats"]["unique_graphs"]
    tensors = [sample.tensors(rows) for rows in (3, 2)]
    runs = [compiler.compile(sample.step, f"rows{len(x[3])}", x, [9] * len(x[3])) for x in tensors]
    assert compiler.num_compilations == 2
    before = sample.ops.gathered_bytes
    for number in range(100):
        given, run = tensors[number % 2], runs[number % 2]
        for old, new in zip(given[:-1], sample.tensors(len(given[3]))[:-1], strict=True):
            old.copy_(new)
        kv_lengths = [LENGTH + 3 * number + row for row in range(len(given[3]))]
        result = run(kv_lengths).clone()
        assert torch.equal(result, sample.step(given, kv_lengths))
    assert counters["stats"]["unique_graphs"] == graphs + 2
    assert sample.ops.gathered_bytes > before


@pytest.mark.slow  # tests/npu/test_compiler.py has it for the compilers of NPUs
def test_a_step_that_does_not_take_its_kv_lengths_is_refused(sample: Sample) -> None:
    def constant(tensors: Sequence[Tensor], kv_lengths: Sequence[int]) -> Tensor:
        return sample.step(tensors, [kv_lengths[0]] * 2)

    compiler = load_compiler("cpu", "inductor", key="sample")
    with pytest.raises(GraphError, match=r"bucket constant: its graph has 1 inputs for KV lengths, and the step has 2"):
        compiler.compile(constant, "constant", sample.tensors(2), [9, 9])


def test_what_cannot_be_compiled_is_refused(sample: Sample) -> None:
    compiler = load_compiler("cpu", "inductor", key="sample")
    with pytest.raises(ValueError, match="bucket short: a KV length is less than 2"):
        compiler.compile(sample.step, "short", sample.tensors(2), [9, 1])
    compiler.freeze()
    with pytest.raises(GraphError, match="bucket late was not compiled"):
        compiler.compile(sample.step, "late", sample.tensors(2), [9, 9])
    assert compiler.num_refused == 1


def test_modes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="device cpu: unknown value 'ge'; choose one of eager, inductor"):
        load_compiler("cpu", "ge", key="sample")
