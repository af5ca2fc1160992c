"""The table of versions against the torch_npu that is installed here."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from torch_npu import npu

from lopa_ascend import LLM
from lopa_ascend.backend.npu import DEVICE
from lopa_ascend.backend.npu.versions import FIRST_POST_RELEASES, UnsupportedStackError
from lopa_ascend.config import EngineConfig
from tests.npu.lab import device  # noqa: F401

pytestmark = pytest.mark.npu


def load_ops(graph_mode: str, **options: Any) -> Any:
    return DEVICE.load_ops(EngineConfig(device="npu", graph_mode=graph_mode, **options))


@pytest.mark.parametrize("mode", FIRST_POST_RELEASES)
def test_this_stack_is_taken_and_the_options_arrive(mode: str) -> None:
    ops = load_ops(mode, attention_layout="BSH")
    assert ops.device.type == "npu"
    assert ops.kernel_layout == "BSH"


def test_it_has_what_the_table_says() -> None:
    schema = torch.ops.npu.npu_scatter_pa_kv_cache.default._schema
    assert "cache_mode" in [argument.name for argument in schema.arguments]
    assert "npugraph_ex" in torch._dynamo.list_backends(exclude_tags=())


def test_a_cann_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("torch_npu.npu.utils"), "get_cann_version", lambda: "8.3.RC1")
    with pytest.raises(UnsupportedStackError, match=r"CANN 8\.3\.RC1 is too old"):
        load_ops("eager")


def test_a_driver_that_is_too_old_is_refused_for_captures_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lopa_ascend.backend.npu.versions.driver_version", lambda: "24.1.rc3.7")
    with pytest.raises(UnsupportedStackError, match=r"driver 24\.1\.rc3\.7 cannot .* install Ascend HDK 25\.5\.1"):
        load_ops("npugraph_ex")
    load_ops("eager")


def test_an_engine_is_refused_variables_that_break_captures_before_it_looks_for_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    monkeypatch.setenv("ASCEND_LAUNCH_BLOCKING", "1")
    message = (
        r"graph mode npugraph_ex cannot run: TASK_QUEUE_ENABLE is '2', .*; set TASK_QUEUE_ENABLE=1\. "
        "ASCEND_LAUNCH_BLOCKING is '1', .*; set ASCEND_LAUNCH_BLOCKING=0"
    )
    with pytest.raises(UnsupportedStackError, match=message):
        LLM(tmp_path, device="npu")
    with pytest.raises(ValueError, match=str(tmp_path)):
        LLM(tmp_path, device="npu", graph_mode="eager")


def test_kernels_are_not_compiled_at_run_time_and_tensors_keep_the_nd_format() -> None:
    npu.config.allow_internal_format = True
    load_ops("eager")
    assert npu.is_jit_compile_false()
    options = [torch_npu._C._npu_getOption(name) for name in ("jitCompile", "ALLOW_INTERNAL_FORMAT")]
    assert options == [b"disable", b"disable"]
