"""The fusion passes, in order: later ones build on the results of earlier ones. The last one adds ops that write into
an argument, so no pass may move a node after it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from lopa_ascend.backend.interface import Ops
from lopa_ascend.graph.fusion.nodes import aten, memory_roots, source_line, static, value
from lopa_ascend.graph.fusion.patterns import RESULT, Call, Cast, Either, Half, Match, Some
from lopa_ascend.graph.fusion.rewriter import Change, Fusion, NotFused, Rewriter
from lopa_ascend.graph.fusion.rope import Rope
from lopa_ascend.graph.fusion.rope_packing import RopePacking

Pass = Callable[[Rewriter], list[Change]]
"""Rewrites a graph in place, and says what it rewrote and what it left."""
OURS = "lopa_ascend"


def is_number(found: Any) -> bool:
    return isinstance(found, float)


def is_vector(found: Any) -> bool:
    return isinstance(found, Node) and value(found).dim() == 1


X, WEIGHT, BIAS, EPS = Some("x"), Some("weight"), Some("bias"), Some("eps", is_number)


def passes(ops: Ops) -> dict[str, Pass]:
    total = Call(aten.add.Tensor, X, Some("residual"), name="total")
    return {
        "rms_norm": Fusion(RMS_NORM, rewrite_rms_norm),
        "rope": Rope(),
        "bias": Fusion(BIASED, rewrite_bias),
        "packing": pack_linears,
        "rope_packing": RopePacking(),
        "swiglu": Fusion(SWIGLU, rewrite_swiglu),
        "linear": Linear(),
        "add_rms_norm": Fusion(Call(ops.rms_norm, total, WEIGHT, EPS), rewrite_add_rms_norm, ("total", RESULT)),
    }


# RMSNorm. In bfloat16 it is computed in float32, and rounded before or after the product with the weight.

WIDE = Cast(X)
SQUARE = Either(Call(aten.pow.Tensor_Scalar, WIDE, 2), Call(aten.mul.Tensor, WIDE, WIDE))
SHIFTED = Call((aten.add.Tensor, aten.add.Scalar), Call(aten.mean.dim, SQUARE, [-1], True), EPS)
NORMED = Call(aten.mul.Tensor, WIDE, Call(aten.rsqrt.default, SHIFTED, name="scale"), commutes=True)
RMS_NORM = Either(
    Cast(Call(aten.mul.Tensor, Cast(WEIGHT), Cast(NORMED), commutes=True)),
    Call(aten.rms_norm.default, X, [Some("size")], WEIGHT, EPS),
)


def rewrite_rms_norm(rewriter: Rewriter, match: Match) -> Sequence[Node]:
    x, weight, result = value(match["x"]), value(match["weight"]), value(match[RESULT])
    if weight.shape != x.shape[-1:] or x.dim() < 2:
        raise NotFused(f"a weight {list(weight.shape)} is not for the last dimension of {list(x.shape)}")
    if not x.dtype == weight.dtype == result.dtype:
        raise NotFused(f"input {x.dtype}, weight {weight.dtype} and result {result.dtype} differ")
    scale = match.bound.get("scale")  # None: torch's RMSNorm, which is one op
    in_float32 = scale is None or value(scale).dtype == torch.float32
    if not in_float32 or x.dtype == torch.float64 or match.dtypes - {x.dtype, torch.float32}:
        raise NotFused("it is not computed in float32")
    return [rewriter.call(rewriter.ops.rms_norm, match["x"], match["weight"], match["eps"])]


def summands(rewriter: Rewriter, match: Match) -> tuple[Node, Node]:
    """(x, residual) of a sum. The kernel may write into the residual, so nothing may read the residual later."""
    total, pair = match["total"], [match["x"], match["residual"]]
    result = value(total)
    values = [value(node) for node in pair if isinstance(node, Node)]  # a number is no node
    are_alike = all(x.shape == result.shape and x.dtype == result.dtype for x in values)
    if len(values) < 2 or not are_alike:
        raise NotFused("the summands are not of one shape and dtype")
    roots = memory_roots(rewriter.graph, rewriter.ops)
    if roots[pair[0]] & roots[pair[1]]:
        raise NotFused("the summands share memory")
    for residual in sorted(pair):
        if dies_at(residual, total, roots) and 0 not in value(residual).stride():
            x = pair[1] if residual is pair[0] else pair[0]
            return x, residual
    raise NotFused(f"{pair[0].name} and {pair[1].name} are both still needed, or not the graph's own")


def dies_at(node: Node, reader: Node, roots: Mapping[Node, frozenset[Node]]) -> bool:
    """Whether a node's result lies in memory that the graph allocates and that nothing reads after ``reader``."""
    if any(root.op != "call_function" for root in roots[node]):
        return False
    sharing = {other for other, its_roots in roots.items() if its_roots & roots[node] and other.op != "output"}
    users = set[Node]().union(*(other.users for other in sharing)) - sharing
    return all(user <= reader for user in users)


def rewrite_add_rms_norm(rewriter: Rewriter, match: Match) -> Sequence[Node]:
    both = rewriter.call(rewriter.ops.add_rms_norm, *summands(rewriter, match), match["weight"], match["eps"])
    normed, total = rewriter.parts(both, 2)
    return total, normed


# Linear layers.

BIASED = Call(
    aten.add.Tensor,
    Call(aten.linear.default, X, WEIGHT, None, name="product"),
    Some("bias", is_vector),
    commutes=True,
)


def rewrite_bias(rewriter: Rewriter, match: Match) -> Sequence[Node]:
    """A vector that is added to a linear layer without bias: its bias."""
    product, bias = value(match["product"]), value(match["bias"])
    if bias.shape != product.shape[-1:] or bias.dtype != product.dtype:
        raise NotFused(f"{match['bias'].name} is not of the shape or dtype of a bias")
    return [rewriter.call(aten.linear.default, match["x"], match["weight"], match["bias"])]


def pack_linears(rewriter: Rewriter) -> list[Change]:
    """Makes linear layers with the same input one layer with a stacked weight, followed by a split. The layer before
    SiLU comes first, as ``swiglu`` wants it."""
    layers: dict[Node, list[Node]] = defaultdict(list)
    for node in rewriter.graph.nodes:
        if node.target is aten.linear.default:
            layers[node.args[0]].append(node)
    return [pack_group(rewriter, x, group) for x, group in layers.items() if len(group) > 1]


def pack_group(rewriter: Rewriter, x: Node, group: list[Node]) -> Change:
    group = sorted(group, key=lambda node: aten.silu.default not in {user.target for user in node.users})
    names = tuple(node.name for node in group)
    line = source_line(group[0])
    weights: list[Any] = [node.args[1] for node in group]
    biases: list[Any] = [node.args[2] if len(node.args) > 2 else None for node in group]
    num_biases = sum(bias is not None for bias in biases)

    def build(_: Match) -> Sequence[Node]:
        if num_biases not in (0, len(group)):
            raise NotFused("some have a bias and some have none")
        stacks = [weights, biases] if num_biases else [weights]
        if any(node.op != "get_attr" for stack in stacks for node in stack):
            raise NotFused("a weight or a bias is no constant of the graph")
        stacked = [rewriter.constant(torch.cat([rewriter.tensor(node) for node in stack])) for stack in stacks]
        whole = rewriter.call(aten.linear.default, x, *stacked)
        sizes = [value(node).shape[-1] for node in group]
        split = rewriter.call(aten.split_with_sizes.default, whole, sizes, -1)
        parts = rewriter.parts(split, len(group))
        keep_contiguous(rewriter, group)
        return parts

    try:
        return Change(rewriter.rewrite(Match({"x": x}, tuple(group)), group, build), line=line)
    except NotFused as refusal:
        return Change(names, str(refusal), line)


def keep_contiguous(rewriter: Rewriter, layers: Sequence[Node]) -> None:
    """Inserts a contiguous copy where the graph returns a view of a result of ``layers``, or a foreign op reads one.
    Packing makes these results slices, whose views are no longer contiguous; callers and foreign kernels may need that.
    """
    roots = memory_roots(rewriter.graph, rewriter.ops)
    for view in [node for node in roots if roots[node] & set(layers)]:
        foreign = [user for user in view.users if user.op == "output" or is_foreign(user.target)]
        if foreign and value(view).is_contiguous():
            with rewriter.graph.inserting_after(view):
                whole = rewriter.call(aten.contiguous.default, view)
            for user in foreign:
                user.replace_input_with(view, whole)


def is_foreign(target: Any) -> bool:
    return isinstance(target, OpOverload) and target.namespace not in ("aten", "prims", OURS)


class Linear:
    """Makes linear layers with a constant weight the backend's, with the weight stored as the backend wants it."""

    def __init__(self) -> None:
        self._stored: dict[str, Node] = {}
        self._fusion = Fusion(Call(aten.linear.default, X, WEIGHT, BIAS), self._build)

    def __call__(self, rewriter: Rewriter) -> list[Change]:
        return self._fusion(rewriter)

    def _build(self, rewriter: Rewriter, match: Match) -> Sequence[Node]:
        x, weight, bias = match["x"], match["weight"], match["bias"]
        shape = value(x).shape
        if weight.op != "get_attr":
            raise NotFused(f"{weight.name} is no constant of the graph")
        if len(shape) < 2:
            raise NotFused(f"{x.name} is a single row")
        if str(weight.target) not in self._stored:
            stored = rewriter.ops.stored(rewriter.tensor(weight))
            self._stored[str(weight.target)] = rewriter.constant(stored)
        if len(shape) > 2:
            x = rewriter.call(aten.reshape.default, x, [-1, shape[-1]])
        given = [x, self._stored[str(weight.target)], *([] if bias is None else [bias])]
        out = rewriter.call(rewriter.ops.linear, *given)
        if len(shape) > 2:
            out = rewriter.call(aten.reshape.default, out, [*static(shape[:-1]), value(out).shape[-1]])
        return [out]


# SwiGLU.

SWIGLU = Either(
    Call(aten.mul.Tensor, Call(aten.silu.default, Half(X, 0)), Half(X, 1), commutes=True),
    Call(aten.mul.Tensor, Call(aten.silu.default, Some("gate")), Some("up"), commutes=True),
)


def rewrite_swiglu(rewriter: Rewriter, match: Match) -> Sequence[Node]:
    if "x" not in match.bound:
        raise NotFused("gate and up are not the halves of one tensor")
    return [rewriter.call(rewriter.ops.swiglu, match["x"])]
