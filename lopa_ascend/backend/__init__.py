"""Devices: one module per device with the same fused ops; the only place that names hardware."""

from __future__ import annotations

from lopa_ascend.backend.base import Entries, Ops


def load_ops(device: str) -> Ops:
    """The fused ops of a device.

    Raises:
        ValueError: the device is unknown or not supported yet.
    """
    if device != "cpu":
        raise ValueError(f"device: unknown value {device!r}; choose one of cpu")
    from lopa_ascend.backend.cpu import CpuOps

    return CpuOps()


def collective_backend(device: str) -> str:
    """The library of torch.distributed that moves a device's tensors between ranks."""
    return {"cpu": "gloo", "npu": "hccl", "cuda": "nccl"}[device]


__all__ = ["Entries", "Ops", "collective_backend", "load_ops"]
