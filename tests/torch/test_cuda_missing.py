"""What the ordinary environment, which has no Triton, says of the device cuda."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from lopa_ascend.backend.cuda import DEVICE
from lopa_ascend.config import EngineConfig, ParameterError


@pytest.mark.skipif(find_spec("triton") is not None, reason="Triton is installed here")
def test_triton_is_an_extra() -> None:
    with pytest.raises(ParameterError, match=r"device: cuda cannot be used: Triton is missing; pip install -e"):
        DEVICE.open()


def test_cuda_has_graph_modes_of_its_own() -> None:
    assert EngineConfig(device="cuda").graph_mode == "cuda_graphs"
    with pytest.raises(ParameterError, match="'npugraph_ex' for device cuda; choose one of cuda_graphs, eager"):
        EngineConfig(device="cuda", graph_mode="npugraph_ex")
