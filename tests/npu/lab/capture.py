"""ACL graphs on the simulated device: torch.npu.NPUGraph records what is launched and runs it again on the same memory.

A group of tasks can be given other arguments (graph_task_update_begin and _end) while a replay waits for them, as
torchair does with the lengths of attention. All groups of a graph must be updated at every replay: it would wait for
ever, and here the next thing on the device fails instead. Nor may a group be updated while the replay before that one
may still need its arguments: the host, or the stream that updates it, must have waited for that replay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch_npu import npu
from torch_npu.npu import graphs

from tests.npu.lab import device, traffic
from tests.npu.lab.device import Place, on_npu

# The host computes these while it captures; they are no task of the graph.
HOST_SIDE = "_get_max_workspace"


def places(x: Any) -> Any:
    return tree_map_only(Tensor, lambda t: Place.of(t) if on_npu(t) else t, x)


def on_host(x: Any) -> Any:
    """Places as CPU tensors, and the CPU for a device."""
    return tree_map_only(
        (Place, torch.device), lambda x: x.tensor() if isinstance(x, Place) else torch.device("cpu"), x
    )


@dataclass
class Task:
    op: torch._ops.OpOverload
    args: Any
    kwargs: Any
    results: list[Place]

    def run(self) -> None:
        given = on_host((self.args, self.kwargs))
        outputs = [x for x in tree_leaves(self.op(*given[0], **given[1])) if isinstance(x, Tensor)]
        for place, output in zip(self.results, outputs, strict=True):
            target = place.tensor()
            if target.data_ptr() != output.data_ptr():
                target.copy_(output)


@dataclass
class Group:
    """Tasks that can be changed. ``handle`` is the runtime's, and ``updated`` says whether they were changed since the
    graph ran last."""

    tape: Tape
    tasks: list[Task] = field(default_factory=list)
    handle: Any = None
    updated: bool = False


@dataclass(eq=False)
class Tape:
    tasks: list[Task] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    replays: int = 0


class _Captures:
    """What is going on: a tape that records, a group of it that is open, one that is being changed, a replay that waits
    for its groups. ``tapes`` by the id of their graph, ``groups`` by that of their handle."""

    tape: Tape | None = None
    group: Group | None = None
    changing: Group | None = None
    waiting: Tape | None = None
    tapes: dict[int, Tape] = {}
    groups: dict[int, Group] = {}
    # How many replays of a graph are over: all that the host knows of, and when what a stream does next begins.
    over: Counter[Tape] = Counter()
    over_by_stream: dict[int, Counter[Tape]] = {}


def record(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Takes a task into the graph. Nothing is computed: its results have the shapes that the op gives for meta tensors,
    and memory of the graph's pool."""
    if op._schema.name.endswith(HOST_SIDE):
        return device.compute(op, args, kwargs)
    assert _Captures.tape is not None
    results = allocate(op, args, kwargs)
    task = Task(op, places(args), places(kwargs), [Place.of(x) for x in tree_leaves(results) if isinstance(x, Tensor)])
    _Captures.tape.tasks.append(task)
    if _Captures.group is not None:
        _Captures.group.tasks.append(task)
    return results


def allocate(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "out" in kwargs:
        return kwargs["out"]
    given: list[tuple[Tensor, Tensor]] = []

    def to_meta(x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("meta")
        given.append((torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), x))
        return given[-1][0]

    def real(x: Tensor) -> Tensor:
        for meta, tensor in given:
            if meta is x:
                return tensor
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="npu")

    kinds = (Tensor, torch.device)
    return tree_map_only(
        Tensor, real, op(*tree_map_only(kinds, to_meta, args), **tree_map_only(kinds, to_meta, kwargs))
    )


def change(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gives the task of this op in the group that is being changed other arguments."""
    assert _Captures.changing is not None
    (task,) = (task for task in _Captures.changing.tasks if task.op is op)
    task.args, task.kwargs = places(args), places(kwargs)
    return kwargs.get("out")


def nothing_waits() -> None:
    if _Captures.waiting is not None:
        _Captures.waiting = None
        raise RuntimeError("a replayed graph waits for an update of its tasks that did not come")


def run_when_ready() -> None:
    tape = _Captures.waiting
    if tape is not None and all(group.updated for group in tape.groups):
        _Captures.waiting = None
        for task in tape.tasks:
            task.run()
        for group in tape.groups:
            group.updated = False


def tapes() -> list[Tape]:
    """Of all graphs that were captured, in order."""
    return list(_Captures.tapes.values())


def replayed() -> Counter[Tape]:
    return Counter({tape: tape.replays for tape in _Captures.tapes.values()})


def host_waited() -> None:
    _Captures.over = replayed()


def _around(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


def _capture_begin(begin: Callable[..., Any]) -> Callable[..., Any]:
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        nothing_waits()
        begin(self, *args, **kwargs)
        _Captures.tape = _Captures.tapes[id(self)] = Tape()
        device.recorder.take = record

    return capture_begin


def _capture_end(end: Callable[..., Any]) -> Callable[..., Any]:
    def capture_end(self: Any) -> None:
        device.recorder.take, _Captures.tape = None, None
        end(self)

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
        _Captures.group = Group(_Captures.tape)
        _Captures.tape.groups.append(_Captures.group)

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
        over = _Captures.over | _Captures.over_by_stream.get(stream.stream_id, Counter())
        if over[group.tape] < group.tape.replays - 1:
            raise RuntimeError("the tasks of a graph are changed while an earlier replay of it may still run")
        _Captures.changing = group
        device.recorder.take = change

    return update_begin


def _update_end(end: Callable[..., Any]) -> Callable[..., Any]:
    def update_end(stream: Any) -> None:
        end(stream)
        assert _Captures.changing is not None
        _Captures.changing.updated, _Captures.changing, device.recorder.take = True, None, None
        run_when_ready()

    return update_end


def _event_record(record_event: Callable[..., Any]) -> Callable[..., Any]:
    def event_record(self: Any, stream: Any = None) -> None:
        """Behind everything that was replayed: all of it runs on one stream."""
        record_event(self, stream)
        self.over = replayed()

    return event_record


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
_around(graphs.NPUGraph, "capture_begin", _capture_begin)
_around(graphs.NPUGraph, "capture_end", _capture_end)
_around(graphs.NPUGraph, "replay", _replay)
_around(graphs, "_graph_task_group_begin", _group_begin)
_around(graphs, "_graph_task_group_end", _group_end)
_around(graphs, "_graph_task_update_begin", _update_begin)
_around(graphs, "_graph_task_update_end", _update_end)
device.recorder.before.append(nothing_waits)
device.recorder.waited.append(host_waited)
