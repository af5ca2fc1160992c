"""The devices: one package for each, with the same fused ops. Only this package names hardware."""

from lopa_ascend.backend.device import Device, find_device

__all__ = ["Device", "find_device"]
