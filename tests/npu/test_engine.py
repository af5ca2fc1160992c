"""The engine in eager mode on the simulated device: the golden traces in float32, the bundled model in bfloat16, and
everything that it asks of the kernels in strict mode."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_npu import npu

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.backend.npu import DEVICE
from lopa_ascend.backend.npu.gate import WrongKernelError
from lopa_ascend.config import ATTENTION_LAYOUTS, ParameterError
from lopa_ascend.kv.pool import KVPool
from lopa_ascend.model.decoder import Decoder
from lopa_ascend.types import GenerationOutput
from scripts.eval.demo import decoding, evaluate
from scripts.eval.problems import read
from tests import golden
from tests.golden_families import Case
from tests.npu.lab import device  # noqa: F401
from tests.npu.lab.constraints import numeric
from tests.npu.lab.traffic import host_traffic
from tests.npu.strict_ops import StrictOps
from tests.tiers import slow_but
from tests.tiny import write_dream

pytestmark = pytest.mark.npu


@pytest.fixture
def restored_device() -> Iterator[None]:
    yield
    npu.set_device(0)


# ---- numeric mode ----------------------------------------------------------------------------------------------------


@functools.cache
def golden_model(path: str) -> LLM:
    return LLM(path, device="npu", graph_mode="eager", dtype="float32", enable_prefix_caching=False)


BY_KIND = golden.cases_by_kind()
# All cases with the default settings, and one of each other kind.
ORDINARY = {*BY_KIND["A", "block_causal", "max_prob"], *(cases[0] for cases in BY_KIND.values())}


@pytest.mark.parametrize("case", slow_but((case for case in golden.CASES if case != golden.MASK_CHOSEN), ORDINARY))
def test_golden_tokens(case: str) -> None:
    trace = golden.read(case)
    with numeric():
        llm = golden_model(str(golden.model_path(trace)))
        output = llm.generate([trace["prompt_ids"]], golden.decoding_params(trace), quiet=True)[0]
    assert list(output.token_ids) == trace["output_ids"]
    assert output.num_forwards == trace["n_forward_rounds"]


@pytest.mark.parametrize("case", ["v20_b8_th07", "v21_speed_b16"])
def test_golden_traces_of_experts(case: str) -> None:
    found = Case.read(golden.FOLDER / "models" / "llada2" / case / "trace.json")
    with numeric():
        assert found.run(golden_model(str(found.model))) is None


@pytest.mark.parametrize("layout", slow_but(ATTENTION_LAYOUTS, ["TND16"]))
@pytest.mark.parametrize("case", ["nemotron/block_b8_th07_p5", "nemotron/ar_p13", "pangu/block_b32_th09_s8_p21"])
def test_golden_traces_of_causal_models(case: str, layout: str) -> None:
    found = Case.read(golden.FOLDER / "models" / case / "trace.json")
    with numeric():
        options: dict[str, Any] = {"device": "npu", "graph_mode": "eager", "dtype": "float32"}
        llm = strict(LLM(found.model, attention_layout=layout, **options))
        assert found.run(llm) is None


@pytest.mark.slow  # the golden tokens show that the device computes what the CPU does
@pytest.mark.parametrize("count", [8, 50])
def test_the_bundled_model_solves_as_many_problems_as_on_the_cpu(
    count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = read(count)
    with numeric():
        solved = {
            name: evaluate(
                LLM(device=name, graph_mode="eager", dtype="bfloat16"), problems, decoding(num_branches=3)
            ).accuracy
            for name in ("cpu", "npu")
        }
    with capsys.disabled():
        print(f"\n{len(problems)} held-out problems, bfloat16, eager: cpu {solved['cpu']:.1%}, npu {solved['npu']:.1%}")
    assert solved["npu"] >= solved["cpu"] - max(0.02, 1 / count)
    assert solved["npu"] > 0.5  # the CPU solves 68 % of 500


# ---- strict mode -----------------------------------------------------------------------------------------------------


def strict(llm: LLM) -> LLM:
    """Lets the ops check page ids and cache positions before every write."""
    ops: Any = llm.engine.runner.ops
    ops.__class__ = StrictOps
    return llm


def test_the_bundled_model_breaks_no_constraint_in_bsh() -> None:
    """Its heads of 48 are too small for TND."""
    problems, params = read(4), decoding(num_branches=3)
    with numeric():
        expected = evaluate(LLM(device="npu", graph_mode="eager", dtype="bfloat16"), problems, params)
    llm = strict(LLM(device="npu", graph_mode="eager", dtype="bfloat16", attention_layout="BSH"))
    assert evaluate(llm, problems, params) == expected


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads as those of Dream-7B, in bfloat16."""
    path = tmp_path_factory.mktemp("models") / "small"
    shape: dict[str, Any] = {"hidden": 256, "intermediate": 320, "heads": 7, "kv_heads": 1, "head_dim": 128}
    return write_dream(path, **shape, dtype=torch.bfloat16, scale=0.15)


def strict_engine(path: Path, **options: Any) -> LLM:
    return strict(LLM(path, device="npu", graph_mode="eager", **options))


def answers(llm: LLM, window: str) -> list[GenerationOutput]:
    """To prompts of several pages and of less than one, the first of them twice."""
    prompts = [[1 + (seed * n) % 300 for n in range(length)] for seed, length in ((7, 300), (3, 20), (5, 129))]
    params = DecodingParams(
        num_branches=3, window_attention=window, max_new_tokens=20, block_size=8, tau_conf=0.3, ignore_eos=True
    )
    return llm.generate([*prompts, prompts[0]], params, quiet=True)


@pytest.mark.parametrize("window", ["block_causal", "full"])
def test_no_step_breaks_a_constraint(small: Path, window: str) -> None:
    by_layout = []
    for layout in ATTENTION_LAYOUTS:
        llm = strict_engine(small, attention_layout=layout)
        first, second = answers(llm, window), answers(llm, window)
        assert [len(output.token_ids) for output in first] == [20] * 4
        assert [output.cached_tokens for output in second] == [300, 20, 129, 300]
        assert [output.token_ids for output in second] == [output.token_ids for output in first]
        by_layout.append([output.token_ids for output in first])
    assert by_layout[0] == by_layout[1] == by_layout[2]


def test_tnd16_copies_no_page_table_on_the_device(small: Path) -> None:
    """Entries are divided on the host, so a step launches what it launches in TND."""
    params = DecodingParams(num_branches=3, max_new_tokens=64, ignore_eos=True)
    launches, tokens = [], []
    for layout in ("TND", "TND16"):
        llm = LLM(small, device="npu", graph_mode="eager", enable_prefix_caching=False, attention_layout=layout)
        with host_traffic() as traffic:
            tokens.append(llm.generate([[1, 2, 3]], params, quiet=True)[0].token_ids)
        launches.append(traffic.launches)
    assert tokens[0] == tokens[1]
    assert launches[0] == launches[1]


@pytest.mark.parametrize("layout", ATTENTION_LAYOUTS)
def test_a_pool_with_fewer_pages_than_the_entries_have_together(small: Path, layout: str) -> None:
    """Pages that branches share count once in the pool and once an entry in the documents of the kernel."""
    roomy = strict_engine(small, attention_layout=layout)
    page = KVPool.page_bytes(roomy.config.kv_shape(), torch.bfloat16)
    tight = strict_engine(small, attention_layout=layout, kv_cache_memory=14 * page, enable_prefix_caching=False)
    expected = [output.token_ids for output in answers(roomy, "block_causal")]
    with host_traffic() as traffic:
        assert [output.token_ids for output in answers(tight, "block_causal")] == expected
    writes, attentions = (
        sum(name == f"npu::npu_{kernel}" for name in traffic.launches)
        for kernel in ("scatter_pa_kv_cache", "fused_infer_attention_score")
    )
    assert attentions > writes, "no step had more than the pool, so this shows nothing"


def test_strict_mode_refuses_a_position_that_is_written_twice(small: Path) -> None:
    runner = strict_engine(small).engine.runner
    k = torch.zeros(2, 1, 128, dtype=torch.bfloat16, device="npu")
    slots = torch.tensor([5, 5], device="npu")
    with pytest.raises(ValueError, match=r"slot_mapping: \[5\] are written more than once"):
        runner.ops.kv_write(k, k, runner.pool.k[0], runner.pool.v[0], slots)


def test_float32_is_refused_by_the_kernels_not_computed_in_another_way(small: Path) -> None:
    with pytest.raises(WrongKernelError, match=r"TND .* is refused .*: TND takes bfloat16 alone; .*BSH"):
        strict_engine(small, dtype="float32")


def test_a_step_reads_back_predictions_alone_and_leaves_no_op_to_the_cpu(small: Path) -> None:
    """An op without a kernel on the device is computed on the host, which shows as copies in both directions."""
    llm = LLM(small, device="npu", graph_mode="eager", enable_prefix_caching=False)
    params = DecodingParams(num_branches=3, max_new_tokens=32, ignore_eos=True)
    with host_traffic() as traffic:
        output = llm.generate([[1, 2, 3]], params, quiet=True)[0]
    assert traffic.launches.count("copy to host") == output.num_forwards
    assert set(traffic.stalls) == {"copy to device", "wait aclrtSynchronizeEvent"}


# ---- the device ------------------------------------------------------------------------------------------------------


def test_a_rank_takes_the_npu_of_its_number(
    small: Path, monkeypatch: pytest.MonkeyPatch, restored_device: None
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    llm = strict_engine(small, max_num_seqs=1)
    runner = llm.engine.runner
    assert isinstance(runner.model, Decoder)
    tables = runner.model._rope_tables
    tensors = {*runner.model.weights.values(), runner.pool.caches, tables}
    assert {str(tensor.device) for tensor in tensors} == {str(runner.ops.device)} == {"npu:3"}
    assert len(llm.generate([[1, 2, 3]], DecodingParams(max_new_tokens=8, ignore_eos=True))[0].token_ids) == 8


def test_a_rank_without_an_npu_is_refused(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "16")
    with pytest.raises(ParameterError, match=r"device: this rank needs NPU 16 \(LOCAL_RANK\), but this machine has 16"):
        strict_engine(small)


def test_free_memory_is_what_the_device_has_left() -> None:
    before = DEVICE.free_memory(1)
    held = torch.empty(2**31, dtype=torch.uint8, device="npu")  # more than tests before may have left in a segment
    assert before - DEVICE.free_memory(1) == pytest.approx(held.nbytes, abs=2**22)
    assert DEVICE.kv_memory(16) == DEVICE.free_memory(16) * 4 // 5, "an NPU is not shared by ranks"
    own, total = DEVICE.held_memory()
    assert held.nbytes <= own <= total
    assert DEVICE.usable_memory(16, share=(own + 2**20) / total) == pytest.approx(2**20, abs=1)
    del held
    assert DEVICE.free_memory(1) == pytest.approx(before, abs=2**22)


def test_what_attention_will_refuse_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_dream(tmp_path / "small", hidden=32, heads=4, kv_heads=2)
    with pytest.raises(WrongKernelError):
        LLM(path, device="npu", graph_mode="eager", dtype="float32")
    assert "attention on an NPU takes no float32" in caplog.text
    assert (
        "TND takes heads of 16 to 256 elements, in steps of 16; this model has heads of 8, so choose BSH" in caplog.text
    )
    path = write_dream(tmp_path / "large", hidden=64, heads=4, kv_heads=2)
    caplog.clear()
    LLM(path, device="npu", graph_mode="eager", dtype="bfloat16", attention_layout="BSH")
    assert "attention" not in caplog.text
