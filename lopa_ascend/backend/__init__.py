"""Devices: one module per device with the same fused ops; the only place that names hardware."""

from __future__ import annotations

from lopa_ascend.backend.base import Entries, Ops
from lopa_ascend.config import EngineConfig, ParameterError


def load_ops(config: EngineConfig) -> Ops:
    """The fused ops of the configured device, which becomes this process's as ``open_device`` says.

    Raises:
        ParameterError: an option means nothing on this device.
        UnsupportedStackError: the software of the device is missing or too old for the graph mode.
    """
    if config.device == "npu":
        from lopa_ascend.backend.npu import load_npu_ops

        return load_npu_ops(config.mode, attention_layout=config.attention_layout, debug=config.debug_kv)
    for name in ("attention_layout", "debug_kv"):
        if getattr(config, name) != getattr(EngineConfig, name):
            raise ParameterError(name, f"is for device npu, and this is device {config.device}")
    from lopa_ascend.backend.cpu import CpuOps

    return CpuOps()


def open_device(device: str) -> None:
    """Loads what torch needs for a device and makes one of them this process's; before ranks meet, and before anything
    is allocated. Of several NPUs it is number LOCAL_RANK of the environment, or 0.

    Raises:
        ParameterError: there are not so many.
        UnsupportedStackError: the software of the device is missing or too old.
    """
    if device == "npu":
        from lopa_ascend.backend.npu import open_npu

        open_npu()


def collective_backend(device: str) -> str:
    """The library of torch.distributed that moves a device's tensors between ranks."""
    return {"cpu": "gloo", "npu": "hccl", "cuda": "nccl"}[device]


__all__ = ["Entries", "Ops", "collective_backend", "load_ops", "open_device"]
