"""The NPU backend: the only package that imports torch_npu and torchair."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lopa_ascend.backend.device import Device, Gauge
from lopa_ascend.backend.npu.environment import check_environment
from lopa_ascend.backend.npu.health import gauges, read_dies
from lopa_ascend.backend.npu.versions import CAPTURING_MODES, cann_version, check_installed, driver_version
from lopa_ascend.config import EngineConfig, ModelConfig, ParameterError

if TYPE_CHECKING:
    from lopa_ascend.backend.compiler import Compiler
    from lopa_ascend.backend.interface import Ops, Profiler

MIN_GROUP = 2
"""The kernel of routing takes groups of more experts than these."""
TND_HEADS = range(16, 257, 16)
"""Head dimensions that attention takes in the layouts TND and TND16 by its source (ops-transformer, the tiling of
fused_infer_attention_score); its documents name 128 and 192."""


class Npu(Device):
    """An Ascend NPU: one die."""

    name, resource, collectives = "npu", "NPU", "hccl"
    has_layouts = wants_all_pages = True

    def open(self) -> None:
        """Kernels are then taken as they are installed, instead of being compiled for each new shape, and tensors keep
        the ND format, which the ops of this project take."""
        check_installed("eager")
        from torch_npu import npu

        index, count = int(os.environ.get("LOCAL_RANK", 0)), npu.device_count()
        if index >= count:
            message = f"this rank needs NPU {index} (LOCAL_RANK), but this machine has {count} NPUs, numbered from 0"
            raise ParameterError("device", message)
        npu.set_device(index)
        npu.set_compile_mode(jit_compile=False)
        npu.config.allow_internal_format = False

    def read_health(self) -> Sequence[Gauge]:
        return gauges(read_dies(with_links=True))

    def communicator_options(self, backend: str, purpose: str, timeout: int) -> Any:
        if backend != "hccl":
            return None
        from lopa_ascend.backend.npu import hccl

        return hccl.communicator_options(purpose, timeout)

    def free_memory(self, ranks: int) -> int:
        from torch_npu import npu

        npu.empty_cache()
        free: int = npu.mem_get_info()[0]
        return free

    def held_memory(self) -> tuple[int, int]:
        from torch_npu import npu

        return npu.memory_reserved(), npu.mem_get_info()[1]

    def _load_ops(self, config: EngineConfig) -> Ops:
        check_installed(config.graph_mode)
        check_environment(os.environ, config.graph_mode)
        self.open()
        from lopa_ascend.backend.npu.ops import NpuOps

        return NpuOps(attention_layout=config.attention_layout)

    def check_model(self, config: EngineConfig, model: ModelConfig, path: Path, *, codes: str | None) -> Sequence[str]:
        if model.experts is not None and (size := model.experts.num_experts // model.experts.num_groups) <= MIN_GROUP:
            found = f"{path}: groups of {size} experts (num_experts / n_group)"
            raise ParameterError("model", f"{found} are too small for device npu, which takes more than {MIN_GROUP}")
        if model.dtype != "bfloat16":
            message = f"on device npu needs dtype bfloat16, got {model.dtype}"
            if config.quantization is not None:
                raise ParameterError("quantization", f"'w8a8' {message}")
            if codes is not None:
                raise ParameterError("model", f"int8 weights {message}")
        return tuple(_doubts(config.attention_layout, model))

    def checked_ops(
        self, ops: Ops, config: EngineConfig, model: ModelConfig, max_keys: int, *, is_causal: bool, codes: str | None
    ) -> tuple[Ops, str]:
        import torch

        from lopa_ascend.backend.npu.gate import AttentionShape, right_ops
        from lopa_ascend.backend.npu.ops import NpuOps
        from lopa_ascend.backend.npu.trials import LayerShape, check_kernels

        assert isinstance(ops, NpuOps)
        ranks, experts, dtype = config.tensor_parallel_size, model.experts, getattr(torch, model.dtype)
        heads, kv_heads = model.num_heads // ranks, model.local_kv_heads(ranks)
        queries = min(config.graph_params.block_size, max_keys)
        shape = AttentionShape(
            queries=queries,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=model.head_dim,
            dtype=dtype,
            max_keys=max_keys,
            entries=max(1, config.batched_tokens(max_keys) // queries),
            is_causal=is_causal,
        )
        right = right_ops(ops, shape, config.graph_mode in CAPTURING_MODES)
        layer = LayerShape(
            hidden=model.hidden_size,
            inner=model.intermediate_size // ranks,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=model.head_dim,
            rotary_dim=model.rotary_dim,
            eps=model.rms_norm_eps,
            dtype=dtype,
            experts=experts and replace(experts, inner=experts.inner // ranks),
            has_int8=codes is not None,
        )
        check_kernels(right, layer)
        return right, right.attention_layout

    def load_compiler(self, mode: str, key: str, directory: Path | None) -> Compiler:
        from lopa_ascend.backend.npu.compiler import Ge, NpuGraphEx

        return {"npugraph_ex": NpuGraphEx, "ge": Ge}[mode](key, directory)

    @property
    def profiler(self) -> Profiler:
        from lopa_ascend.backend.npu import profiler

        return profiler

    def versions(self) -> Mapping[str, str | None]:
        from torch_npu import npu

        return {"npu": npu.get_device_name(npu.current_device()), "driver": driver_version(), "cann": cann_version()}


def _doubts(attention_layout: str, model: ModelConfig) -> Iterator[str]:
    """Settings that the kernel of attention will refuse: its own error comes in the first step only, and names no
    setting."""
    if model.dtype == "float32":
        yield "attention on an NPU takes no float32; choose dtype bfloat16"
    if attention_layout != "BSH" and model.head_dim not in TND_HEADS:
        sizes = f"{TND_HEADS[0]} to {TND_HEADS[-1]} elements, in steps of {TND_HEADS.step}"
        found = f"this model has heads of {model.head_dim}, so choose BSH"
        yield f"attention_layout {attention_layout} takes heads of {sizes}; {found}"


DEVICE = Npu()
