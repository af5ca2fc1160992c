"""The devices: one package for each, with the same fused ops. Only this package names hardware."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lopa_ascend.config import EngineConfig, ModelConfig, ParameterError

if TYPE_CHECKING:
    from lopa_ascend.backend.interface import Ops, Profiler


def load_ops(config: EngineConfig) -> Ops:
    """Opens the configured device as ``open_device`` does, and loads its fused ops.

    Raises:
        ParameterError: ``attention_layout`` has no meaning on this device, or the device does not exist or is too old.
        UnsupportedStackError: the software of an NPU is missing, or too old for the graph mode.
    """
    if config.device == "npu":
        from lopa_ascend.backend.npu import load_npu_ops

        return load_npu_ops(config.graph_mode, attention_layout=config.attention_layout)
    if config.attention_layout != EngineConfig.attention_layout:
        raise ParameterError("attention_layout", f"is for device npu, and this is device {config.device}")
    if config.device == "cuda":
        from lopa_ascend.backend.cuda import load_cuda_ops

        return load_cuda_ops()
    if config.graph_mode == "inductor":
        _check_inductor()
    from lopa_ascend.backend.cpu import load_cpu_ops

    return load_cpu_ops(packs_weights=config.graph_mode == "eager")


def checked_ops(ops: Ops, config: EngineConfig, model: ModelConfig, dtype: str, max_keys: int) -> tuple[Ops, str]:
    """Compares attention on an NPU with float32; other devices are taken as they are.

    Args:
        ops: of ``load_ops``.
        dtype: of queries and keys, e.g. "bfloat16".
        max_keys: positions of the longest sequence.

    Returns:
        The ops of an attention layout that computes rightly, and the layout.

    Raises:
        WrongKernelError: no layout does; names the kernel, its shape and its error.
    """
    if config.device != "npu":
        return ops, config.attention_layout
    import torch

    from lopa_ascend.backend.npu.gate import AttentionShape, right_ops
    from lopa_ascend.backend.npu.ops import NpuOps
    from lopa_ascend.backend.npu.versions import CAPTURING_MODES

    assert isinstance(ops, NpuOps)
    shape = AttentionShape(
        queries=min(config.graph_params.block_size, max_keys),
        heads=model.num_heads // config.tensor_parallel_size,
        kv_heads=model.local_kv_heads(config.tensor_parallel_size),
        head_dim=model.head_dim,
        dtype=getattr(torch, dtype),
        max_keys=max_keys,
    )
    right = right_ops(ops, shape, config.graph_mode in CAPTURING_MODES)
    return right, right.attention_layout


def _check_inductor() -> None:
    """Refuses a torch that cannot compile steps whose KV lengths change."""
    import torch

    if not hasattr(getattr(torch.compiler, "config", None), "dynamic_sources"):
        message = (
            f'"inductor" needs the option dynamic_sources of torch.compile, which torch {torch.__version__} does not '
            'have; use "eager", or torch 2.13'
        )
        raise ParameterError("graph_mode", message)


def open_device(device: str) -> None:
    """Loads what torch needs for a device, and makes one such device the current one of this process: of several NPUs
    or GPUs number LOCAL_RANK of the environment, or 0. Must be called before the ranks meet or anything is allocated
    there.

    Raises:
        ParameterError: the device does not exist, or is too old.
        UnsupportedStackError: the software of an NPU is missing or too old.
    """
    if device == "npu":
        from lopa_ascend.backend.npu import open_npu

        open_npu()
    elif device == "cuda":
        from lopa_ascend.backend.cuda import open_cuda

        open_cuda()


def load_profiler(device: str) -> Profiler:
    """The profiler of "cpu" or "npu"."""
    if device == "npu":
        from lopa_ascend.backend.npu import profiler as npu_profiler

        return npu_profiler
    from lopa_ascend.backend.cpu import profiler

    return profiler


def collective_backend(device: str) -> str:
    """The backend of torch.distributed for tensors on a device."""
    if device == "cuda":
        from lopa_ascend.backend.cuda import is_interpreted

        return "gloo" if is_interpreted() else "nccl"
    return {"cpu": "gloo", "npu": "hccl"}[device]


def communicator_options(backend: str, purpose: str, timeout: int) -> Any:
    """Options of a group's communicator for ``torch.distributed.new_group``; None for the defaults.

    Args:
        backend: see ``collective_backend``.
        purpose: "tp" or "bp".
        timeout: seconds after which a silent rank is given up.
    """
    if backend != "hccl":
        return None
    from lopa_ascend.backend.npu import hccl

    return hccl.communicator_options(purpose, timeout)
