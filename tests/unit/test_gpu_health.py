"""What nvidia-smi says of GPUs, and what /metrics makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from lopa_ascend.backend.cuda.health import gauges
from lopa_ascend.serve.observe.dies import Dies
from lopa_ascend.serve.observe.metrics import metrics_text

PRINTED = "0, 1024, 143771, 37, 41, 0\n1, 0, 24564, [N/A], 33, [N/A]\n"
"""An H200, and a GPU that has no ECC and does not tell how busy it is."""


def printed(text: str, command: Sequence[str]) -> str:
    fields = "index,memory.used,memory.total,utilization.gpu,temperature.gpu,ecc.errors.uncorrected.volatile.total"
    assert command == ("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    return text


def test_metrics() -> None:
    async def read() -> str:
        gpus = Dies(lambda: gauges(lambda command: printed(PRINTED, command)))
        gpus.refresh()
        assert gpus._reading is not None
        await gpus._reading
        return metrics_text([], gpus).decode()

    lines = asyncio.run(read()).splitlines()
    for line in (
        'lopa:gpu_memory_used_bytes{gpu="0"} 1.073741824e+09',
        'lopa:gpu_memory_total_bytes{gpu="1"} 2.5757220864e+10',
        'lopa:gpu_utilization_ratio{gpu="0"} 0.37',
        'lopa:gpu_temperature_celsius{gpu="1"} 33.0',
        'lopa:gpu_memory_errors{gpu="0"} 0.0',
    ):
        assert line in lines
    assert not [
        line
        for line in lines
        if line.startswith(('lopa:gpu_utilization_ratio{gpu="1"', 'lopa:gpu_memory_errors{gpu="1"'))
    ]


@pytest.mark.parametrize("text", ["", "No devices were found\n", "0, 1024\n", "0, a, 2, 3, 4, 5\n"])
def test_what_is_not_understood_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"nvidia-smi printed|could not convert|invalid literal"):
        gauges(lambda command: printed(text, command))
