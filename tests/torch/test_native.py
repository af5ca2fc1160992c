"""The ops in C++: what they promise beyond the definitions, which test_definition.py holds them to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lopa_ascend.backend.cpu import definition
from lopa_ascend.backend.cpu.native import NativeOps, kernels
from lopa_ascend.backend.cpu.native.ops import is_whole
from lopa_ascend.backend.cpu.ops import CpuOps
from lopa_ascend.backend.interface import Entries
from lopa_ascend.families import dream
from lopa_ascend.kv.pages import PAGE_SIZE
from lopa_ascend.model.base import ForwardInputs
from lopa_ascend.model.decoder import Decoder
from lopa_ascend.score.shards import shard_scores
from lopa_ascend.types import Scoring
from tests.dream_checkpoint import load
from tests.tiers import examples
from tests.tiny import write_dream
from tests.torch.native import native_ops
from tests.torch.paging import paged_step, randn


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    return native_ops()


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def one_entry(entries: Entries, i: int) -> Entries:
    """Entry i in a step of its own."""
    prefix = entries.prefixes[entries.prefix_groups[i]]
    return Entries(entries.lengths[i : i + 1], entries.kv_lengths[i : i + 1], entries.page_tables[[i]], (0,), (prefix,))


@settings(max_examples=examples(100))
@given(
    st.integers(1, 14) | st.integers(100, 300),
    st.integers(1, 700),
    st.integers(1, 3),
    st.integers(1, 7),
    st.sampled_from([16, 32, 48, 80, 128, 256]),
    st.sampled_from([0.1, 1.0, 30.0]),
    st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_long_entries_and_all_head_dimensions(
    ops: NativeOps, length: int, own_keys: int, kv_heads: int, group: int, dim: int, size: float, dtype: torch.dtype
) -> None:
    """Entries that several tasks share, and scores of any size; test_definition.py has many small entries."""
    entries, k_cache, v_cache = paged_step([(0, length, own_keys), (1, 3, 5)], (0, 150), kv_heads, dim, dtype)
    heads = kv_heads * group
    q = (size * randn(length + 3, heads + kv_heads, dim)).to(dtype)[:, :heads]  # as beside the keys of one projection
    plain = definition.attention(q, k_cache, v_cache, entries).float()
    largest_value = v_cache.float().nan_to_num().abs().max()
    error = 2**-7 if dtype == torch.bfloat16 else 2**-14 * max(size, 1) / 30 * dim**0.5
    assert (ops.attention(q, k_cache, v_cache, entries).float() - plain).abs().max() <= error * largest_value
    assert ops.gathered_bytes == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 7), (2, 3)])
def test_attention_of_an_entry_does_not_depend_on_the_others(
    ops: NativeOps, threads: int, kv_heads: int, group: int, dtype: torch.dtype
) -> None:
    shapes = [(i % 3, length, 3 + length % 40) for i, length in enumerate((1, 2, 7, 31, 32, 33, 70, 200, 32, 32))]
    entries, k_cache, v_cache = paged_step(shapes, (0, 131, 200), kv_heads, 64, dtype)
    q = randn(sum(entries.lengths), group * kv_heads, 64).to(dtype)
    together = ops.attention(q, k_cache, v_cache, entries)
    assert torch.equal(ops.attention(q, k_cache, v_cache, entries.divided(16)), together)
    torch.set_num_threads(1)
    for i, (start, length) in enumerate(zip(accumulate(entries.lengths, initial=0), entries.lengths, strict=False)):
        span = slice(start, start + length)
        assert torch.equal(ops.attention(q[span], k_cache, v_cache, one_entry(entries, i)), together[span])


def test_beside_long_entries_short_ones_keep_their_bits(ops: NativeOps) -> None:
    """With AMX torch attends for long entries and causal ones, and the kernel for short ones."""
    mixed = NativeOps(ops._kernels, has_attention=False)
    shapes = [(0, 4, 9), (1, 40, 50), (0, 3, 70), (1, 8, 8), (0, 9, 30)]
    entries, k_cache, v_cache = paged_step(shapes, (0, 131), 2, 64, torch.bfloat16)
    entries = replace(entries, causal=(False, False, True, False, False))
    q = randn(sum(entries.lengths), 4, 64).bfloat16()
    together = mixed.attention(q, k_cache, v_cache, entries)
    largest_value = v_cache.float().nan_to_num().abs().max()
    plain = definition.attention(q, k_cache, v_cache, entries)
    assert (together.float() - plain.float()).abs().max() <= 2**-6 * largest_value
    starts = list(accumulate(entries.lengths, initial=0))
    for i, causal in enumerate(entries.causal):
        span, alone = slice(starts[i], starts[i + 1]), replace(one_entry(entries, i), causal=(causal,))
        computing = ops if entries.lengths[i] <= 8 and not causal else CpuOps()
        for each in (mixed, computing):
            assert torch.equal(each.attention(q[span], k_cache, v_cache, alone), together[span])


def test_scores_far_apart_overflow_nothing(ops: NativeOps) -> None:
    entries, k_cache, v_cache = paged_step([(0, 1, 1)], (150,), 1, 16, torch.bfloat16)
    q = torch.full((1, 1, 16), 100.0).bfloat16()
    k_cache[entries.page_tables[0].long()] = -10
    k_cache[entries.page_tables[0, 1], 22] = 10
    values = v_cache[entries.page_tables[0].long()].flatten(0, 1)[:151, 0]
    assert torch.equal(ops.attention(q, k_cache, v_cache, entries)[0], values[150])
    k_cache[entries.page_tables[0].long()] = 10
    k_cache[entries.page_tables[0, 1], 22] = -10
    expected = values[:150].float().mean(0)
    torch.testing.assert_close(ops.attention(q, k_cache, v_cache, entries)[0].float(), expected, rtol=2**-7, atol=2**-7)


def test_element_wise_results_do_not_depend_on_the_other_rows(ops: NativeOps, threads: int) -> None:
    rows, size = 705, 192
    x, residual = randn(2, rows, size).bfloat16()
    weight, bias = randn(2, size, seed=1).bfloat16()
    heads, angles = randn(rows, 3, 64, seed=2).bfloat16(), randn(rows, 1, 32, seed=3)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    matrix, weight_scale = (randn(size, size, seed=4) * 40).to(torch.int8), randn(size, seed=5).abs()

    def results(part: slice) -> list[Tensor]:
        codes, scale = ops.rms_norm_quant(x[part], weight, 1e-6)
        return [
            ops.rms_norm(x[part], weight, 1e-6),
            *ops.add_rms_norm(x[part], residual[part].clone(), weight, 1e-6),
            *ops.add_rms_norm_quant(x[part], residual[part].clone(), weight, 1e-6),
            ops.swiglu(x[part]),
            *ops.swiglu_quant(x[part]),
            ops.rope(heads[part], cos[part], sin[part]),
            *ops.norm_rope(heads[part, :2], heads[part, 2:], bias[:64], bias[64:128], 1e-6, cos[part], sin[part]),
            ops.quant_linear(codes, scale, matrix, weight_scale, bias, torch.bfloat16),
        ]

    wide_norm, wide_heads = bias[:48].float(), torch.cat([heads, heads], -1)[..., :48].float()
    wide_cos, wide_sin = cos[..., :24].float().contiguous(), sin[..., :24].float().contiguous()

    def wide_results(part: slice) -> list[Tensor]:
        """Half a head is no whole number of vectors."""
        angles = wide_cos[part], wide_sin[part]
        return [
            ops.rms_norm(x[part].float(), weight.float(), 1e-6),
            *ops.add_rms_norm(x[part].float(), residual[part].float(), weight.float(), 1e-6),
            ops.swiglu(x[part].float()),
            ops.rope(wide_heads[part], *angles),
            *ops.norm_rope(wide_heads[part], wide_heads[part], wide_norm, wide_norm, 1e-6, *angles),
        ]

    whole = results(slice(None)) + wide_results(slice(None))
    torch.set_num_threads(1)
    for begin in range(0, rows, 47):
        part = slice(begin, begin + 13)
        for alone, among_others in zip(results(part) + wide_results(part), whole, strict=True):
            assert torch.equal(alone, among_others[part])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("confidence", ["max_prob", "neg_entropy"])
def test_statistics_of_logits_are_those_of_torch(
    ops: NativeOps, threads: int, confidence: str, dtype: torch.dtype
) -> None:
    """With ties, masks and ids that do not exist anywhere, logits that are far apart or not finite, and gaps between
    rows."""
    for size, mask, limit in ((1, 1, 1), (15, 3, 14), (16, 15, 20), (1000, 999, 1000), (4099, -5, 4050), (300, 7, 0)):
        torch.set_num_threads(threads)
        scoring = Scoring(confidence, mask, limit)
        x = (20 * randn(8, size + 5, seed=size)).to(dtype)[:, :size]
        x[1] = x[1].round()
        x[2, size // 2 :] = 9.0
        x[3] *= 20
        x[4, size // 3] = torch.inf
        x[5, -1] = torch.nan
        x[6, : size // 2] = -torch.inf
        before, positions = x.clone(), torch.arange(8)
        found = ops.shard_stats(x, mask, limit, confidence == "neg_entropy")
        assert torch.equal(x[:4], before[:4])
        expected = shard_scores(x.clone(), scoring, positions, 0)
        for rows in ((0, 1, 2, 3, 7), (6,) if size > 1 else ()):
            exact = [0, -2, -1]  # the largest logit, the best one, its column
            assert torch.equal(found[rows, :][:, exact], expected[rows, :][:, exact])
            torch.testing.assert_close(found[rows, :], expected[rows, :], rtol=2e-5, atol=2e-5, equal_nan=True)
        assert not found[4:6, :2].isfinite().all(-1).any()
        torch.set_num_threads(1)
        for row in range(8):
            alone = ops.shard_stats(x[row : row + 1], mask, limit, confidence == "neg_entropy")
            assert torch.equal(alone[0].view(torch.int32), found[row].view(torch.int32))


def test_a_row_with_nan_has_no_scale(ops: NativeOps) -> None:
    """Whichever element is NaN: its request is to fail, and no other."""
    for column in (0, 15, 16, 63):
        x = randn(2, 128).bfloat16()
        x[1, column] = torch.nan
        for _, scale in (ops.swiglu_quant(x), ops.rms_norm_quant(x, torch.ones(128).bfloat16(), 1e-6)):
            assert scale.isnan().tolist() == [False, True]


def test_infinite_gates_and_empty_rows(ops: NativeOps) -> None:
    gate = torch.tensor([3e38, -3e38, 0.0, -100.0] * 4).bfloat16()
    up = torch.full((16,), 2.0).bfloat16()
    out = ops.swiglu(torch.cat([gate, up])[None])
    assert out[0, :4].tolist() == [torch.inf, 0, 0, 0]
    codes, scale = ops.swiglu_quant(torch.zeros(2, 32).bfloat16())
    assert not codes.any()
    assert not scale.any()


def test_a_model_computes_what_it_does_by_torch(ops: NativeOps, tmp_path: Path) -> None:
    """All ops together, with the shapes that a model gives them: angles differ by head."""
    path = write_dream(tmp_path, hidden=64, intermediate=96, heads=2, kv_heads=1, head_dim=32, dtype=torch.bfloat16)
    positions = torch.arange(40)
    entries = Entries((40,), (40,), torch.zeros(1, 1, dtype=torch.int32), (0,), (0,))
    inputs = ForwardInputs(positions % 50, positions, positions, None, entries, rows=None)
    hidden = []
    for each in (CpuOps(), ops):
        model = Decoder(dream.FAMILY, *load(path), each)
        k_caches, v_caches = torch.zeros(2, model.config.num_layers, 1, PAGE_SIZE, 1, 32, dtype=torch.bfloat16)
        hidden.append(model.forward(inputs, list(k_caches), list(v_caches)).float())
    plain, native = hidden
    assert (native - plain).norm() < 0.05 * plain.norm()  # both round to bfloat16 after each op


@pytest.mark.parametrize(
    ("dtype", "size", "is_taken"),
    [(torch.bfloat16, 64, True), (torch.float32, 64, True), (torch.float16, 64, False), (torch.bfloat16, 24, False)],
)
def test_what_is_left_to_torch(dtype: torch.dtype, size: int, is_taken: bool) -> None:
    x = torch.zeros(3, 2, size, dtype=dtype)
    assert is_whole(x, size) == is_taken
    assert not is_whole(x.transpose(0, 1), size)


def test_a_library_that_does_not_load_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "library.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(kernels, "find_spec", lambda name: type("Spec", (), {"origin": str(broken)}))
    assert kernels.find_kernels() is None
    assert "torch computes everything" in caplog.text


def test_torchs_library_is_found_where_paths_have_spaces() -> None:
    line = "7f00-7f01 r-xp 00000000 fd:00 17                         /home/My Models/lib/libgomp-a3.so.1.0.0"
    found = kernels.OPENMP.search(
        f"7f00-7f01 r-xp 00000000 fd:00 16   /lib/libc.so\n{line}\n7f02 rw-p 00 00:00 0 [heap]"
    )
    assert found is not None
    assert found[1] == "/home/My Models/lib/libgomp-a3.so.1.0.0"
