"""What an NPU is asked at start: faults of the simulated device are found, named, and avoided where possible."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_npu import npu

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.backend.compiler import GraphError
from lopa_ascend.backend.npu import gate
from lopa_ascend.backend.npu.gate import AttentionShape, Sample, WrongKernelError, right_ops
from lopa_ascend.backend.npu.ops import NpuOps
from tests.npu.lab import attention, capture
from tests.npu.lab.constraints import numeric, require
from tests.tiers import slow_but
from tests.tiny import write_dream

pytestmark = pytest.mark.npu
SHAPE = AttentionShape(queries=32, heads=4, kv_heads=2, head_dim=128, dtype=torch.bfloat16, max_keys=1300)
CAUSAL = replace(SHAPE, is_causal=True)
LAYOUTS = ("TND", "TND16", "BSH")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [SHAPE, CAUSAL, replace(CAUSAL, queries=1, max_keys=40)])
def test_a_device_that_computes_rightly_keeps_its_layout(shape: AttentionShape, layout: str) -> None:
    ops = NpuOps(attention_layout=layout)
    assert right_ops(ops, shape, captures=True) is ops


def test_graphs_are_captured_and_replayed_in_inference_mode_and_outside_it() -> None:
    """An engine captures in inference mode. The checks of the next one in this process are not in it."""
    sample, lengths = Sample(NpuOps(), SHAPE), [100, 1300]
    with torch.inference_mode():
        runs = [sample.captured()]
    runs.append(sample.captured())
    for run, inference in product(runs, (True, False)):
        with torch.inference_mode(inference):
            assert sample.fault(run(sample.divided(lengths)), lengths, "a replay") is None


def uniform(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return value.float().mean(0).repeat_interleave(query.shape[1] // value.shape[1], 0).expand_as(query)


def first_1024_keys(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return attend(query, key[:1024], value[:1024], scale)


attend = attention.attend


def faulty_in_tnd(monkeypatch: pytest.MonkeyPatch, kernel: Any) -> None:
    spans, layouts = attention.query_spans, [""]

    def noted(query: Tensor, lengths: Sequence[int] | None, layout: str, heads: int) -> list[Tensor]:
        layouts[0] = layout
        return spans(query, lengths, layout, heads)

    def by_layout(*given: Any) -> Tensor:
        found: Tensor = (kernel if layouts[0] == "TND" else attend)(*given)
        return found

    monkeypatch.setattr(attention, "query_spans", noted)
    monkeypatch.setattr(attention, "attend", by_layout)


@pytest.mark.parametrize("kernel", [uniform, first_1024_keys])
def test_where_tnd_is_wrong_bsh_is_taken_with_one_warning(
    kernel: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faulty_in_tnd(monkeypatch, kernel)
    assert right_ops(NpuOps(), SHAPE, captures=True).attention_layout == "BSH"
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    message = record.getMessage()
    lengths = r"[64, 131]" if kernel is uniform else "[1300, 127]"
    for text in (
        "npu_fused_infer_attention_score in the layout TND",
        "the error is",
        "heads=4",
        lengths,
        "BSH is right",
    ):
        assert text in message


def test_where_tnd_is_refused_bsh_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = attention.query_spans

    def at_most_16(query: Tensor, lengths: Sequence[int] | None, layout: str, heads: int) -> list[Tensor]:
        require(layout == "BSH", "561002: TND takes 16 queries")
        return spans(query, lengths, layout, heads)

    monkeypatch.setattr(attention, "query_spans", at_most_16)
    assert right_ops(NpuOps(), SHAPE, captures=False).attention_layout == "BSH"


def test_where_tnd_refuses_as_many_queries_as_keys_a_causal_model_takes_bsh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its documents have it."""
    check, spans_of, layouts = attention.check_mask, attention.query_spans, [""]

    def noted(query: Tensor, lengths: Sequence[int] | None, layout: str, heads: int) -> list[Tensor]:
        layouts[0] = layout
        return spans_of(query, lengths, layout, heads)

    def with_fewer(mask: Tensor | None, mode: int, spans: Sequence[Tensor], kv_lengths: Sequence[int]) -> bool:
        fewer = all(len(span) < length for span, length in zip(spans, kv_lengths, strict=True))
        require(fewer or mode == 0 or layouts[0] == "BSH", "561002: fewer queries than keys")
        return check(mask, mode, spans, kv_lengths)

    monkeypatch.setattr(attention, "query_spans", noted)
    monkeypatch.setattr(attention, "check_mask", with_fewer)
    assert right_ops(NpuOps(), SHAPE, captures=True).attention_layout == "TND"
    assert right_ops(NpuOps(), CAUSAL, captures=True).attention_layout == "BSH"


def test_where_causal_attention_is_wrong_causal_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "attend_causally", attend)
    assert right_ops(NpuOps(), SHAPE, captures=True).attention_layout == "TND"
    with pytest.raises(WrongKernelError, match="is wrong in a single call of causal entries"):
        right_ops(NpuOps(), CAUSAL, captures=True)


def test_where_no_layout_is_right_the_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "attend", uniform)
    with pytest.raises(WrongKernelError, match=r"layout TND16 is wrong in a single call.*; .*layout BSH is wrong"):
        right_ops(NpuOps(attention_layout="TND16"), SHAPE, captures=False)


def test_where_an_update_is_lost_the_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "change", lambda op, args, kwargs: kwargs.get("out"))
    with pytest.raises(WrongKernelError, match=r"is wrong in a captured graph: .* try graph_mode eager"):
        right_ops(NpuOps(), SHAPE, captures=True)
    assert right_ops(NpuOps(), SHAPE, captures=False)


def test_where_a_graph_hangs_the_start_ends_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where an event is recorded that the graph does not see."""
    stopped: list[int] = []
    monkeypatch.setattr(gate, "HANG_SECONDS", 0.05)
    monkeypatch.setattr(npu, "stop_device", stopped.append)
    record = npu.ExternalEvent.record
    monkeypatch.setattr(npu.ExternalEvent, "record", lambda *_: None)
    with pytest.raises(GraphError, match=r"captured graph did not end within 0.05 s, so NPU 0 of"):
        right_ops(NpuOps(), SHAPE, captures=True)
    assert stopped == [0]
    monkeypatch.setattr(npu.ExternalEvent, "record", record)
    with pytest.raises(RuntimeError, match="waits for events"):
        torch.zeros(1, device="npu").cpu()


@pytest.mark.parametrize("mode", slow_but(["eager", "npugraph_ex"], ["eager"]))
def test_an_engine_whose_tnd_is_wrong_answers_in_bsh(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_dream(tmp_path, hidden=64, heads=4, kv_heads=2, dtype=torch.bfloat16)
    options: dict[str, Any] = {"device": "npu", "max_num_seqs": 1, "graph_window_blocks": 2, "max_model_len": 160}
    params = DecodingParams(max_new_tokens=40, ignore_eos=True)
    tokens = []
    with numeric():
        for layout in ("BSH", "TND16"):
            if layout != "BSH":
                faulty_in_tnd(monkeypatch, uniform)
            llm = LLM(path, graph_mode=mode, attention_layout=layout, **options)
            tokens.append(llm.generate([[5, 3, 8]], params, quiet=True)[0].token_ids)
    assert tokens[0] == tokens[1]
    assert "attention_layout BSH is right, and is taken instead" in caplog.text


def test_a_bucket_that_hangs_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_dream(tmp_path, hidden=64, heads=4, kv_heads=2, dtype=torch.bfloat16)
    monkeypatch.setattr(gate, "HANG_SECONDS", 0.05)
    monkeypatch.setattr(npu, "stop_device", lambda _: None)
    checked = gate.first_fault

    def and_then_hangs(*given: Any) -> str | None:
        found = checked(*given)
        monkeypatch.setattr(npu.ExternalEvent, "record", lambda *_: None)
        return found

    monkeypatch.setattr(gate, "first_fault", and_then_hangs)
    with numeric(), pytest.raises(GraphError, match=r"bucket sequences1_blocks2_pages2 did not end"):
        LLM(path, device="npu", graph_mode="npugraph_ex", max_num_seqs=1, graph_window_blocks=2, max_model_len=160)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="waits for events"):
        torch.zeros(1, device="npu").cpu()
