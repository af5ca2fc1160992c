"""A kind of device, for the rooms above: one object, which knows all that only this kind needs."""

from __future__ import annotations

import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lopa_ascend.backend import memory
from lopa_ascend.config import GRAPH_MODES_BY_DEVICE, EngineConfig, ModelConfig, ParameterError

if TYPE_CHECKING:  # the HTTP process asks for facts, and has no torch
    from lopa_ascend.backend.compiler import Compiler
    from lopa_ascend.backend.interface import Ops, Profiler


TIMEOUT = 20.0
"""Seconds for one command's answer; npu-smi may hang if a die does."""

Ask = Callable[[Sequence[str]], str]
"""Runs a command, and returns its output. Raises OSError or subprocess.SubprocessError if it cannot."""


def ask(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=True)
    return done.stdout


class Gauge(NamedTuple):
    """A measure of each die or GPU of a machine."""

    name: str
    text: str
    values: Mapping[int, float | None]
    """By its number; None: not known."""
    label: str = "die"


class Device(ABC):
    """A kind of device. Its package has an instance, ``DEVICE``, and imports torch in methods alone."""

    name: str
    resource: str
    """Ray's name for what a rank needs."""
    codes: tuple[str, ...] = ("int8",)
    """Dtypes of weights that ``Ops`` multiplies, beside floats."""
    has_layouts = False
    free_tokens = 128
    """Tokens of a forward pass that take hardly longer than one: about as long as reading the weights."""
    wants_all_pages = False
    """Whether one kernel attends for a whole compiled step only if the KV pool has a page for each place in the step's
    page tables."""

    def read_health(self) -> Sequence[Gauge]:
        """Measures this machine's dies or GPUs, which may take seconds. Raises OSError, subprocess.SubprocessError or
        ValueError if nothing can be known."""
        return ()

    # ---- ranks -----------------------------------------------------------------------------------------------------

    def open(self) -> None:  # noqa: B027  # a CPU needs nothing
        """Loads what torch needs for this device, and selects NPU or GPU number LOCAL_RANK of the environment, or 0.
        Comes before the ranks meet and anything is allocated there.

        Raises:
            ParameterError: the device does not exist, or is too old.
            UnsupportedStackError: the software of an NPU is missing or too old.
        """

    @property
    @abstractmethod
    def collectives(self) -> str:
        """The backend of torch.distributed for tensors on this device."""

    def communicator_options(self, backend: str, purpose: str, timeout: int) -> Any:
        """Options of a group's communicator, for the purpose "tp" or "bp", which gives up a silent rank after
        ``timeout`` seconds; None for the defaults."""
        return None

    def rank_needs(self, config: EngineConfig) -> int:
        """How much of ``resource`` one rank takes."""
        return 1

    # ---- memory ----------------------------------------------------------------------------------------------------

    @property
    def on_host(self) -> bool:
        """Whether tensors lie in CPU memory, which all ranks of the machine share."""
        return False

    @abstractmethod
    def free_memory(self, ranks: int) -> int:
        """Bytes that this process can allocate on its own NPU or GPU, or as one of ``ranks`` processes that share a
        CPU's memory. Gives back first what torch has cached on the device."""

    def held_memory(self) -> tuple[int, int]:
        """Bytes that this process holds on its NPU or GPU, and the device's total."""
        raise NotImplementedError("tensors lie in the memory of the CPU")

    def usable_memory(self, ranks: int, share: float | None = None) -> int:
        """``free_memory``, but with a share of the device's whole memory at most what this process lacks of it."""
        free = self.free_memory(ranks)
        if share is None:
            return free
        held, total = self.held_memory()
        return max(0, min(free, int(total * share) - held))

    def kv_memory(self, ranks: int, reserved: int = 0, share: float | None = None) -> int:
        """Bytes of one rank's KV pool, once its weights are loaded. Beside ``reserved`` bytes it takes half of a CPU's
        usable memory, at most 4 GiB, or four fifths of a device's: activations, graphs and collectives need the rest.
        """
        free = max(0, self.usable_memory(ranks, share) - reserved)
        return min(memory.MAX_KV_MEMORY, free // 2) if self.on_host else free * 4 // 5

    def check_memory(self, needed: int, ranks: int, share: float | None = None) -> None:  # noqa: B027  # few devices do
        """Raises a ParameterError if the device cannot hold a rank's weights, ``needed`` bytes, in a share of its
        memory."""

    # ---- computing -------------------------------------------------------------------------------------------------

    def load_ops(self, config: EngineConfig) -> Ops:
        """Opens the device as ``open`` does, and loads its fused ops. Raises like ``open``; also if the device has no
        such ``attention_layout``, no memory of its own for ``gpu_memory_utilization``, or its software cannot run the
        graph mode."""
        if config.gpu_memory_utilization is not None and self.on_host:
            message = "needs a GPU or an NPU: here the memory is that of the machine; choose kv_cache_memory"
            raise ParameterError("gpu_memory_utilization", message)
        if config.attention_layout != EngineConfig.attention_layout and not self.has_layouts:
            message = f"is for device {_those_with('has_layouts')}, and this is device {self.name}"
            raise ParameterError("attention_layout", message)
        return self._load_ops(config)

    @abstractmethod
    def _load_ops(self, config: EngineConfig) -> Ops:
        """``load_ops`` after its check."""

    def check_model(self, config: EngineConfig, model: ModelConfig, path: Path, *, codes: str | None) -> Sequence[str]:
        """What may go wrong, for the user. Needs no weights. ``model`` has the dtype that the weights are to have;
        ``codes`` is the dtype of linear weights, stored or quantised; None: floats. ParameterError if the model, or a
        setting, does not go with the device."""
        return ()

    def check_codes(self, param: str, value: str, codes: str) -> None:
        """Raises ParameterError for quantised weights ("int8", "int4" or "fp8") without a kernel. The setting ``param``
        with this value asks for them."""
        if codes not in self.codes:
            message = f"{value} means {codes} weights, for which device {self.name} has no kernels"
            others = " or ".join(name for name in GRAPH_MODES_BY_DEVICE if codes in find_device(name).codes)
            remedy = f"choose device {others}, or a bfloat16 or W8A8 checkpoint (quantization w8a8)"
            raise ParameterError(param, f"{message}; {remedy}")

    def checked_ops(
        self, ops: Ops, config: EngineConfig, model: ModelConfig, max_keys: int, *, is_causal: bool, codes: str | None
    ) -> tuple[Ops, str]:
        """The ops of an attention layout that computes rightly, and the layout. The other kernels were tried too.
        ``model`` has the dtype of queries and keys; ``max_keys`` is the longest sequence's positions; ``codes``: see
        ``check_model``.

        Raises:
            WrongKernelError: a kernel is wrong, attention in every layout; names it, its shape and its error.
            GraphError: a kernel hangs.
        """
        return ops, config.attention_layout

    @abstractmethod
    def load_compiler(self, mode: str, key: str, directory: Path | None) -> Compiler:
        """The compiler of a graph mode of this device other than "eager" (``graph.compile.load_compiler``)."""

    @property
    @abstractmethod
    def profiler(self) -> Profiler:
        """Records what the device computes."""

    def versions(self) -> Mapping[str, str | None]:
        """What to know of the opened device and its software before a report is read; None: not known."""
        return {}


def find_device(name: str) -> Device:
    """The device of a row of ``GRAPH_MODES_BY_DEVICE``."""
    device: Device = import_module(f"lopa_ascend.backend.{name}").DEVICE
    return device


def _those_with(capability: str) -> str:
    """The devices for which an attribute holds, e.g. "cpu or npu"."""
    return " or ".join(name for name in GRAPH_MODES_BY_DEVICE if getattr(find_device(name), capability))
