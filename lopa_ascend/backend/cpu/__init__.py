"""The CPU backend. ``definition`` says in plain torch what every fused op computes, ``ops`` computes it fast."""

from lopa_ascend.backend.cpu.ops import CpuOps, keep_freed_memory

__all__ = ["CpuOps", "keep_freed_memory"]
