"""Environment variables with which the NPU backend cannot run: one list for the engine and the pre-flight checks.

Each entry was read off torch_npu's sources (the file is named) or off vllm-ascend's. Values are taken as torch_npu
takes them: a number is what the text begins with, and 0 if it begins with none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lopa_ascend.backend.npu.versions import CAPTURING_MODES, UnsupportedStackError

TASK_QUEUE = "TASK_QUEUE_ENABLE"
BLOCKING = "ASCEND_LAUNCH_BLOCKING"
ALLOCATOR, NPU_ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF"
PINNED_SEGMENTS = "pin_memory_expandable_segments"
VARIABLES = (TASK_QUEUE, BLOCKING, NPU_ALLOCATOR, ALLOCATOR)


@dataclass(frozen=True)
class Refusal:
    variable: str
    value: str
    reason: str
    """What the value means, or breaks."""
    remedy: str

    def __str__(self) -> str:
        return f"{self.variable} is {self.value!r}, {self.reason}; {self.remedy}"


def refusals(environment: Mapping[str, str], graph_mode: str) -> Iterator[Refusal]:
    captures = graph_mode in CAPTURING_MODES
    queue = environment.get(TASK_QUEUE)
    if queue is not None and number(queue) not in (0, 1, 2):  # OptionsManager.cpp, GetTaskQueueEnable
        yield Refusal(TASK_QUEUE, queue, "and torch_npu knows 0, 1 and 2", f"set {TASK_QUEUE}=1")
    elif queue is not None and number(queue) == 2 and captures:  # NPUGraph.cpp, capture_begin
        yield Refusal(TASK_QUEUE, queue, "with which torch_npu refuses to capture graphs", f"set {TASK_QUEUE}=1")
    blocking = environment.get(BLOCKING)
    if blocking is not None and number(blocking) and captures:  # vllm-ascend's platform.py refuses it too
        reason = "which makes the host wait for every kernel: that cannot be captured"
        yield Refusal(BLOCKING, blocking, reason, f"set {BLOCKING}=0, or serve with --graph-mode eager")
    if ALLOCATOR in environment and NPU_ALLOCATOR in environment:  # NPUAllocatorConfig.cpp, instance
        reason = f"and {NPU_ALLOCATOR} is set too, which torch_npu refuses"
        yield Refusal(ALLOCATOR, environment[ALLOCATOR], reason, f"unset one of the two, e.g. {ALLOCATOR}")
    for variable in (NPU_ALLOCATOR, ALLOCATOR):
        value = environment.get(variable, "")
        if captures and allocator_option(value, PINNED_SEGMENTS) == "True":  # NPUGraph.cpp, capture_begin
            reason = "whose pinned memory torch_npu refuses to capture"
            yield Refusal(variable, value, reason, f"set {variable} without {PINNED_SEGMENTS}:True")


def check_environment(environment: Mapping[str, str], graph_mode: str) -> None:
    """Refuses such variables with an UnsupportedStackError that names each, its value, and what to set."""
    if found := list(refusals(environment, graph_mode)):
        raise UnsupportedStackError(f"graph mode {graph_mode} cannot run: " + ". ".join(map(str, found)))


def number(text: str) -> int:
    """What C's ``strtol`` makes of a text."""
    found = re.match(r"\s*([+-]?\d+)", text)
    return int(found[1]) if found else 0


def allocator_option(options: str, name: str) -> str | None:
    """The last value of an option of torch's allocators in a text such as
    "expandable_segments:True,max_split_size_mb:64"."""
    values = re.findall(rf"(?:^|,){name}:(\w+)", re.sub(r"\s", "", options))
    return values[-1] if values else None
