"""ACL graphs on the simulated device: torch.npu.NPUGraph records tasks, and runs them again on the same memory.

Before a group of tasks, a captured graph waits for an event of its own (ExternalEvent), and resets it. Until that event
is recorded, the tasks can be given other arguments (graph_task_update_begin and _end); torch_npu does this with the KV
lengths of attention. Tasks keep their arguments from one replay to the next. Three rules are checked at replays:

- At every replay, the events of all groups must be recorded. On a device the replay would wait for ever; here, whatever
  is launched next fails.
- A group must not be updated, nor its event be recorded, while the previous replay may still need them: the host, or
  the stream that does it, must have waited for that replay.
- A group must not be updated between the record of its event and the end of the replay that it lets go on.

A capture refuses ops and graphs that ``limits`` excludes, and ops of which ``units`` does not know what computes them.
A group holds tasks of cube and vector cores alone. An update changes the KV lengths of a task and nothing else: it
keeps the kernel, the shapes, the number of entries and the workspace.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch_npu import npu
from torch_npu.npu import graphs

from tests.npu.lab import attention, collectives, device, limits, traffic, units
from tests.npu.lab.device import Place, on_npu


def places(x: Any) -> Any:
    """Replaces tensors on ``npu`` by their places, in any nested arguments."""
    return tree_map_only(Tensor, lambda t: Place.of(t) if on_npu(t) else t, x)


def on_host(x: Any) -> Any:
    """Replaces places by CPU tensors, and devices by the CPU, in any nested arguments."""
    return tree_map_only(
        (Place, torch.device), lambda x: x.tensor() if isinstance(x, Place) else torch.device("cpu"), x
    )


@dataclass
class Task:
    """One launch that a graph holds."""

    op: torch._ops.OpOverload
    args: Any
    """Positional arguments, with places instead of tensors."""
    kwargs: Any
    """Keyword arguments, with places instead of tensors."""
    results: list[Place]
    """Where the results are written."""
    unit: str
    """What computes it; see ``units``."""

    def run(self) -> None:
        given = on_host((self.args, self.kwargs))
        outputs = [x for x in tree_leaves(device.cpu_result(self.op, *given)) if isinstance(x, Tensor)]
        for place, output in zip(self.results, outputs, strict=True):
            target = place.tensor()
            # torch_npu 2.10 allocates the second scale of npu_add_rms_norm_dynamic_quant even where it is not computed.
            if output.numel() and target.data_ptr() != output.data_ptr():
                target.copy_(output)


@dataclass
class Group:
    """Tasks of a graph whose arguments can be changed together."""

    tape: Tape
    """The graph that they belong to."""
    event: Any
    """The event that the graph waits for before the tasks."""
    tasks: list[Task] = field(default_factory=list)
    handle: Any = None
    """The runtime's handle of the group."""
    released: bool = False
    """Whether the event was recorded since the graph ran last."""


@dataclass(eq=False)
class Tape:
    """What one graph holds."""

    tasks: list[Task] = field(default_factory=list)
    """All tasks, in the order of their launches."""
    groups: list[Group] = field(default_factory=list)
    """The groups of tasks whose events must be recorded at every replay."""
    communicators: set[str] = field(default_factory=set)
    """Names of the process groups of its collectives."""

    @property
    def on_aicpu(self) -> list[str]:
        """Names of the ops, and of the collectives, that run on the device's CPU."""
        return [task.op.name() for task in self.tasks if task.unit == units.AICPU]

    @property
    def stream_waits(self) -> int:
        """Pairs of an event and a wait between the stream of the graph and that of HCCL, which no task counts: one
        before each collective and one after it."""
        return 2 * sum(task.op.namespace == collectives.NAMESPACE for task in self.tasks)

    replays: int = 0
    """Replays that were launched."""


class _Captures:
    """The state of all captures and replays of this process."""

    tape: Tape | None = None
    """The tape that records."""
    group: Group | None = None
    """The group of that tape that is open."""
    event: Any = None
    """The event that the graph that is captured was the last to wait for."""
    changing: Group | None = None
    """The group whose tasks are being changed."""
    waiting: Tape | None = None
    """The tape whose replay waits for the events of its groups."""
    tapes: dict[int, Tape] = {}
    """Tapes by the id of their graph."""
    graphs: WeakSet[Any] = WeakSet()
    """The graphs that hold streams of the device."""
    groups: dict[int, Group] = {}
    """Groups by the id of their handle."""
    groups_by_event: dict[int, Group] = {}
    """Groups by the id of their event."""
    over: Counter[Tape] = Counter()
    """For each tape how many replays the host knows to be over."""
    over_by_stream: dict[int, Counter[Tape]] = {}
    """By the id of a stream, for each tape how many replays are over before the stream goes on."""


def record(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Records a task. Nothing is computed: the results have the shapes of the op's results for meta tensors, and memory
    of the graph's pool."""
    if op._schema.name.endswith(device.HOST_SIDE):
        return device.compute(op, args, kwargs)
    assert _Captures.tape is not None
    limits.refuse_without_aclnn(op)
    is_collective = op.namespace == collectives.NAMESPACE
    unit = collectives.unit_of(op, args) if is_collective else units.unit_of(op, args, kwargs)
    if _Captures.group is not None and (unit != units.AICORE or op._schema.name == "aten::copy_"):
        raise RuntimeError(
            f"{op.name()}: error 507009: task not supported; a group of tasks holds kernels of cube and vector cores"
        )
    results = device.allocate(op, args, kwargs)
    written = [Place.of(x) for x in tree_leaves(results) if isinstance(x, Tensor)]
    task = Task(op, places(args), places(kwargs), written, unit)
    _Captures.tape.tasks.append(task)
    if is_collective:
        _Captures.tape.communicators.add(args[-1])
    if _Captures.group is not None:
        _Captures.group.tasks.append(task)
    return results


def change(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gives other arguments to the task of this op in the group that is being changed.

    Raises:
        RuntimeError: the task would be another kernel, or more than its KV lengths would change.
        NpuConstraint: the kernel would need more workspace than the task was captured with.
    """
    assert _Captures.changing is not None
    (task,) = (task for task in _Captures.changing.tasks if task.op is op)
    new_args, new_kwargs = places(args), places(kwargs)
    kernels = [attention.kernel_kind(**given) for given in (task.kwargs, new_kwargs)]
    if kernels[0] != kernels[1]:
        raise RuntimeError(f"RT_ERROR_KERNEL_TYPE: a task is captured as {kernels[0]} and updated as {kernels[1]}")
    before, after = ({**given, attention.KV_LENGTHS: None} for given in (task.kwargs, new_kwargs))
    if (task.args, before) != (new_args, after):
        raise RuntimeError("an update changes other arguments of a task than its KV lengths")
    counts = [len(given[attention.KV_LENGTHS]) for given in (task.kwargs, new_kwargs)]
    if counts[0] != counts[1]:
        raise RuntimeError(f"a task of {counts[0]} entries is updated with {counts[1]} KV lengths")
    attention.require_workspace(*on_host(new_args), **on_host(new_kwargs))
    task.args, task.kwargs = new_args, new_kwargs
    return kwargs.get("out")


def nothing_waits() -> None:
    """Fails if a replay still waits for events."""
    if _Captures.waiting is not None:
        _Captures.waiting = None
        raise RuntimeError("a replayed graph waits for events of its tasks that were not recorded")


def run_when_ready() -> None:
    """Runs the tasks of the replay that waits, once the events of all its groups are recorded."""
    tape = _Captures.waiting
    if tape is not None and all(group.released for group in tape.groups):
        _Captures.waiting = None
        for task in tape.tasks:
            task.run()
        for group in tape.groups:
            group.released = False


def earlier_replays_are_over(tape: Tape, stream: Any) -> bool:
    """Whether every replay of a graph is over before what is launched on a stream now, but for the one that waits."""
    over = _Captures.over | _Captures.over_by_stream.get(stream.stream_id, Counter())
    return over[tape] >= tape.replays - (_Captures.waiting is tape)


def tapes(other_than: Collection[Tape] = ()) -> list[Tape]:
    """The tapes of all graphs that were captured and still exist, in order.

    Args:
        other_than: tapes to leave out. Their number would not do: a graph of before may end meanwhile.
    """
    return [tape for tape in _Captures.tapes.values() if tape not in other_than]


def replayed() -> Counter[Tape]:
    """For each tape the number of replays that were launched."""
    return Counter({tape: tape.replays for tape in _Captures.tapes.values()})


def host_waited() -> None:
    """Notes that the host has waited for the device, so that all replays are over."""
    _Captures.over = replayed()


_lock = threading.RLock()
"""One thread at a time, since another one may update a graph while this one starts its replay."""


def _around(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces a function of torch_npu by one that ``make`` builds around it."""
    function = make(getattr(owner, name))

    @wraps(function)
    def alone(*args: Any, **kwargs: Any) -> Any:
        with _lock:
            return function(*args, **kwargs)

    setattr(owner, name, alone)


def _capture_begin(begin: Callable[..., Any]) -> Callable[..., Any]:
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        nothing_waits()
        begin(self, *args, **kwargs)
        _Captures.tapes.pop(id(self), None)  # of a graph that has ended: the new tape is the last one
        _Captures.tape = _Captures.tapes[id(self)] = Tape()
        _Captures.graphs.add(self)
        device.recorder.taker.take = record
        device.recorder.unwaited.clear()

    return capture_begin


def _capture_end(end: Callable[..., Any]) -> Callable[..., Any]:
    def capture_end(self: Any) -> None:
        device.recorder.taker.take = _Captures.tape = _Captures.group = None
        end(self)
        alive = [_Captures.tapes[id(graph)] for graph in _Captures.graphs]
        limits.refuse_too_many(frozenset(tape.communicators) for tape in alive)

    return capture_end


def _replay(replay: Callable[..., Any]) -> Callable[..., Any]:
    def replay_graph(self: Any) -> None:
        nothing_waits()
        replay(self)
        traffic.launched("replay")
        _Captures.waiting = _Captures.tapes[id(self)]
        _Captures.waiting.replays += 1
        run_when_ready()

    return replay_graph


def _group_begin(begin: Callable[..., Any]) -> Callable[..., Any]:
    def group_begin(stream: Any) -> None:
        begin(stream)
        assert _Captures.tape is not None
        assert _Captures.event is not None, "a task that can be changed must wait for an event of its own"
        _Captures.group = _Captures.groups_by_event[id(_Captures.event)] = Group(_Captures.tape, _Captures.event)
        _Captures.tape.groups.append(_Captures.group)
        _Captures.event = None

    return group_begin


def _group_end(end: Callable[..., Any]) -> Callable[..., Any]:
    def group_end(stream: Any) -> Any:
        group = _Captures.group
        assert group is not None
        group.handle = end(stream)
        _Captures.groups[id(group.handle)], _Captures.group = group, None
        return group.handle

    return group_end


def _update_begin(begin: Callable[..., Any]) -> Callable[..., Any]:
    def update_begin(stream: Any, handle: Any) -> None:
        begin(stream, handle)
        group = _Captures.groups[id(handle)]
        if group.released or not earlier_replays_are_over(group.tape, stream):
            raise RuntimeError("the tasks of a graph are changed while a replay of it may still run them")
        _Captures.changing = group
        device.recorder.taker.take = change

    return update_begin


def _update_end(end: Callable[..., Any]) -> Callable[..., Any]:
    def update_end(stream: Any) -> None:
        end(stream)
        _Captures.changing, device.recorder.taker.take = None, None
        traffic.updated()

    return update_end


def _external_wait(wait: Callable[..., Any]) -> Callable[..., Any]:
    def external_wait(self: Any, stream: Any = None) -> None:
        wait(self, stream)
        if _Captures.tape is not None:
            _Captures.event = self

    return external_wait


def _external_record(record_event: Callable[..., Any]) -> Callable[..., Any]:
    def external_record(self: Any, stream: Any = None) -> None:
        record_event(self, stream)
        group = _Captures.groups_by_event[id(self)]
        if not earlier_replays_are_over(group.tape, npu.current_stream() if stream is None else stream):
            raise RuntimeError("the event of a graph's task is recorded before an earlier replay has reset it")
        group.released = True
        run_when_ready()

    return external_record


def _event_record(record_event: Callable[..., Any]) -> Callable[..., Any]:
    def event_record(self: Any, stream: Any = None) -> None:
        """The event comes after all replays that were launched, for these run on one stream."""
        record_event(self, stream)
        self.over, self.behind = replayed(), _Captures.waiting

    return event_record


def _event_query(query: Callable[..., Any]) -> Callable[..., Any]:
    def event_query(self: Any) -> bool:
        """An event behind a replay that waits does not come."""
        behind = getattr(self, "behind", None)
        return bool(query(self)) and (behind is None or behind is not _Captures.waiting)

    return event_query


def _event_wait(wait: Callable[..., Any]) -> Callable[..., Any]:
    def event_wait(self: Any, stream: Any = None) -> None:
        wait(self, stream)
        waiting = (npu.current_stream() if stream is None else stream).stream_id
        known: Counter[Tape] = _Captures.over_by_stream.get(waiting, Counter())
        then: Any = getattr(self, "over", Counter())
        _Captures.over_by_stream[waiting] = known | then  # the larger number of each

    return event_wait


_around(npu.Event, "record", _event_record)
_around(npu.Event, "wait", _event_wait)
_around(npu.Event, "query", _event_query)
_around(npu.ExternalEvent, "wait", _external_wait)
_around(npu.ExternalEvent, "record", _external_record)
_around(graphs.NPUGraph, "capture_begin", _capture_begin)
_around(graphs.NPUGraph, "capture_end", _capture_end)
_around(graphs.NPUGraph, "replay", _replay)
_around(graphs, "_graph_task_group_begin", _group_begin)
_around(graphs, "_graph_task_group_end", _group_end)
_around(graphs, "_graph_task_update_begin", _update_begin)
_around(graphs, "_graph_task_update_end", _update_end)
device.recorder.before.append(nothing_waits)
device.recorder.waited.append(host_waited)
