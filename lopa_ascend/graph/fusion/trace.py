"""A model in plain torch as one graph of aten ops, which holds for any number of tokens."""

from __future__ import annotations

import copy
import hashlib
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import SymInt, Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

import lopa_ascend
from lopa_ascend.checkpoint import DTYPES
from lopa_ascend.config import ModelConfig
from lopa_ascend.graph.fusion.nodes import nodes_in, source_line
from lopa_ascend.model.plain import ModelError

EXAMPLE_TOKENS = 10007
"""Tokens of the input that a model is traced with: a prime, so that no other size of a model equals it."""
INSIDE = "plain."
ERRORS = (RuntimeError, AssertionError, ValueError, TypeError, AttributeError, LookupError)
"""What torch raises for modules that it cannot trace, and Python for wrong modules."""
LIBRARIES = tuple(str(Path(str(package.__file__)).parent) for package in (torch, lopa_ascend))


@torch.library.custom_op("lopa_ascend::attend", mutates_args=())
def attend_op(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
    """Stands for the engine's attention in a graph, until ``bind.bind_attend`` replaces it."""
    raise NotImplementedError("attend stands in a graph, and is never run")


@attend_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1] * q.shape[2])


ATTEND = torch.ops.lopa_ascend.attend.default


@dataclass(frozen=True)
class Trace:
    graph: Graph
    """Inputs are ``tokens`` and ``positions``; parameters and buffers are attributes by their names in the module."""
    constants: Mapping[str, Tensor]
    digest: str
    """Equal for models that compute the same ops of tensors of equal shapes, in any process."""

    def module(self, tensors: Mapping[str, Tensor]) -> GraphModule:
        """The graph with the model's parameters and buffers. It may be changed, so call this once."""
        names = {str(node.target) for node in self.graph.find_nodes(op="get_attr")}
        held = {**tensors, **self.constants}
        return GraphModule({name: held[name] for name in names}, self.graph)


class _Exported(nn.Module):
    """What is traced: a plain model with ``attend_op`` as its attention, which checks its arguments."""

    def __init__(self, module: nn.Module, config: ModelConfig):
        super().__init__()
        self.plain, self.config = module, config

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        c = self.config

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if not isinstance(layer, int) or not 0 <= layer < c.num_layers:
                raise ValueError(f"attend: layer is {layer!r}, expected a number from 0 to {c.num_layers - 1}")
            heads = q.shape[1] if q.dim() == 3 else 0
            if heads == 0 or heads % c.num_kv_heads:
                shape = f"[T, H, {c.head_dim}] with H a multiple of {c.num_kv_heads}"
                raise ValueError(f"attend: q has shape {_shape(q.shape)}, expected {shape}")
            for name, x, number in (("q", q, heads), ("k", k, c.num_kv_heads), ("v", v, c.num_kv_heads)):
                _check(f"attend: {name}", x, (tokens.shape[0], number, c.head_dim), c)
            attended: Tensor = attend_op(q, k, v, layer)
            return attended

        hidden: Tensor = self.plain(tokens, positions, attend)
        if not isinstance(hidden, Tensor):
            raise TypeError(f"forward returned {type(hidden).__name__}, expected a tensor")
        return hidden


def trace(module: nn.Module, config: ModelConfig, device: torch.device) -> Trace:
    """Traces a plain model for a device; nothing is computed, and the parameters may be on the meta device. ModelError
    names the line if no graph of ``forward`` holds for any number of tokens from two on. A step of one token runs the
    same graph."""
    name = config.model_type
    twin = copy.deepcopy(module)
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch about itself
        exported = _Exported(twin.to_empty(device=device), config)
        example = tuple(torch.empty(EXAMPLE_TOKENS, dtype=torch.int32, device=device) for _ in range(2))
        size = torch.export.Dim("num_tokens", min=2)
        try:
            program = torch.export.export(exported, example, dynamic_shapes=({0: size}, {0: size}), strict=False)
            program = program.run_decompositions({})  # makes writes into intermediate results new results
        except ERRORS as error:
            raise ModelError(
                f"model_type {name!r}: forward cannot be traced{_where(error)}: {_reason(error)}"
            ) from error
    try:
        _check_program(program, config)
    except ValueError as error:
        raise ModelError(f"model_type {name!r}: {error}") from None
    graph, constants = _without_inputs(program)
    return Trace(graph, constants, _digest(graph, constants))


# ---- what is refused -------------------------------------------------------------------------------------------------


def _check(what: str, x: Tensor, shape: Sequence[int | SymInt], config: ModelConfig) -> None:
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{what} has shape {_shape(x.shape)}, expected {_shape(shape)}")
    if x.dtype != DTYPES[config.dtype]:
        raise ValueError(f"{what} has dtype {str(x.dtype).removeprefix('torch.')}, expected {config.dtype}")


def _shape(shape: Sequence[int | SymInt]) -> str:
    return f"[{', '.join('T' if isinstance(size, SymInt) else str(size) for size in shape)}]"


def _check_program(program: ExportedProgram, config: ModelConfig) -> None:
    """Raises ValueError for what cannot run in every step alike."""
    signature, graph = program.graph_signature, program.graph
    written = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
    if written:
        raise ValueError(f"forward writes into {str(written[0]).removeprefix(INSIDE)}; a model must keep no state")
    attended = [node.args[3] for node in graph.find_nodes(op="call_function", target=ATTEND)]
    for layer in range(config.num_layers):
        if attended.count(layer) != 1:
            raise ValueError(f"forward calls attend {attended.count(layer)} times for layer {layer}, expected once")
    for node in (node for node in graph.nodes if node.op == "call_function"):
        if free_unbacked_symbols(node.meta.get("val")):
            raise ValueError(f"forward reads a value of a tensor{_line(node)}; no op may depend on one")
        if node.target is torch.ops.aten.as_strided.default:
            raise ValueError(f"forward uses as_strided{_line(node)}; no op may depend on how a tensor lies in memory")
        if isinstance(node.target, HigherOrderOperator):
            raise ValueError(f"forward uses {node.target.name()}{_line(node)}, which no fused graph can hold")
        if isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
            raise ValueError(f"forward draws random numbers{_line(node)}")
    constants = signature.inputs_to_lifted_tensor_constants
    inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
    for node in inputs.values():
        # Single numbers travel along with a launch; a tensor of the host would be copied in every step.
        if node.name in constants and program.constants[constants[node.name]].dim():
            place = _line(next(iter(node.users)))
            raise ValueError(
                f"forward uses a tensor{place} that is no parameter and no buffer; register it as a buffer"
            )
    num_computed = inputs["tokens"].meta["val"].shape[0]
    (output,) = graph.find_nodes(op="output")
    (result,) = nodes_in(output.args)
    _check("the result of forward", result.meta["val"], (num_computed, config.hidden_size), config)


def _line(node: Node) -> str:
    line = source_line(node)
    return f" ({line})" if line else ""


def _where(error: BaseException) -> str:
    """The innermost line that is neither torch's nor this package's."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*LIBRARIES, "<"))  # "<": code that torch has made
    ]
    if not frames:
        return ""
    line = frames[-1]
    return f" ({line.filename}:{line.lineno}, in {line.name}: {line.line})"


def _reason(error: BaseException) -> str:
    """The beginning of torch's messages, which go on for pages."""
    if isinstance(error, torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode):
        return "it branches on a value of a tensor"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].startswith("Constraints violated"):
        return f"it is not the same for every number of tokens: {lines[1].removeprefix('- ')}"
    return lines[0] if lines else type(error).__name__


# ---- from a program to a graph ---------------------------------------------------------------------------------------


def _without_inputs(program: ExportedProgram) -> tuple[Graph, dict[str, Tensor]]:
    """(the program's graph with its parameters, buffers and constants as attributes instead of inputs, constants)."""
    signature, graph = program.graph_signature, program.graph
    graph.owning_module = None  # it would look there for every attribute
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names |= signature.inputs_to_lifted_tensor_constants
    constants: dict[str, Tensor] = {}
    for node in graph.find_nodes(op="placeholder"):
        if node.name not in names:
            continue
        name = names[node.name].removeprefix(INSIDE)
        if node.name in signature.inputs_to_lifted_tensor_constants:
            name = f"constants.{name}"
            constants[name] = program.constants[names[node.name]]
        with graph.inserting_before(node):
            attribute = graph.get_attr(name)
        attribute.meta.update(node.meta)
        node.replace_all_uses_with(attribute)
        graph.erase_node(node)
    (output,) = graph.find_nodes(op="output")
    (result,) = nodes_in(output.args)
    output.args = (result,)
    _inputs_first(graph)
    return graph, constants


def _inputs_first(graph: Graph) -> None:
    first: Node = next(iter(graph.nodes))
    for node in reversed(graph.find_nodes(op="placeholder")):
        first.prepend(node)
        first = node


def _digest(graph: Graph, constants: Mapping[str, Tensor]) -> str:
    lines = [f"{name} {tensor}" for name, tensor in constants.items()]
    for node in graph.nodes:
        found = node.meta.get("val")
        result = f"{_shape(found.shape)} {found.dtype}" if isinstance(found, Tensor) else ""
        lines.append(f"{node} {node.target} {node.args} {node.kwargs} {result}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
