"""The CPU backend. ``definition`` says in plain torch what every fused op computes, ``ops`` computes it fast by
torch, and ``native`` faster in C++, where it can."""

from lopa_ascend.backend.cpu.native import load_cpu_ops
from lopa_ascend.backend.cpu.ops import CpuOps, keep_freed_memory

__all__ = ["CpuOps", "keep_freed_memory", "load_cpu_ops"]
