"""The table of versions against the torch_npu that is installed here."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from lopa_ascend.backend.npu import load_npu_ops
from lopa_ascend.config.npu_versions import FIRST_POST_RELEASES, UnsupportedStackError
from tests.npu.lab import device  # noqa: F401

pytestmark = pytest.mark.npu


@pytest.mark.parametrize("mode", FIRST_POST_RELEASES)
def test_this_stack_is_taken_and_the_options_arrive(mode: str) -> None:
    ops = load_npu_ops(mode, attention_layout="BSH", debug=True)
    assert ops.device.type == "npu"
    k = torch.zeros(2, 1, 16, device="npu")
    with pytest.raises(ValueError, match="outside the cache"):
        ops.kv_write(k, k, k[None], k[None], torch.tensor([0, 5], device="npu"))


def test_it_has_what_the_table_says() -> None:
    schema = torch.ops.npu.npu_scatter_pa_kv_cache.default._schema
    assert "cache_mode" in [argument.name for argument in schema.arguments]
    assert "npugraph_ex" in torch._dynamo.list_backends(exclude_tags=())


def test_a_cann_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("torch_npu.npu.utils"), "get_cann_version", lambda: "8.3.RC1")
    with pytest.raises(UnsupportedStackError, match=r"CANN 8\.3\.RC1 is too old"):
        load_npu_ops("eager")
