"""The fusion passes, in the order in which they run: later ones build on the results of earlier ones."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from lopa_ascend.backend.base import Ops
from lopa_ascend.graph.fusion.nodes import aten, source_line, static, value
from lopa_ascend.graph.fusion.patterns import RESULT, Call, Cast, Either, Half, Match, Some
from lopa_ascend.graph.fusion.rewriter import Change, Fusion, Refused, Rewriter
from lopa_ascend.graph.fusion.rope import Rope
from lopa_ascend.graph.fusion.rope_packing import RopePacking

Pass = Callable[[Rewriter], list[Change]]
"""Rewrites a graph in place, and says what it rewrote and what it left."""
OURS = "lopa_ascend"


def is_number(found: Any) -> bool:
    """Whether an argument is a float literal."""
    return isinstance(found, float)


def is_vector(found: Any) -> bool:
    """Whether an argument is a tensor of one dimension."""
    return isinstance(found, Node) and value(found).dim() == 1


X, WEIGHT, BIAS, EPS = Some("x"), Some("weight"), Some("bias"), Some("eps", is_number)


def passes(ops: Ops) -> dict[str, Pass]:
    """All passes by name, in order."""
    rms_norm = Call(ops.rms_norm, X, WEIGHT, EPS, name="normed")
    total = Call(aten.add.Tensor, X, Some("residual"), name="total")
    return {
        "rms_norm": Fusion(RMS_NORM, rewrite_rms_norm),
        "rms_norm_quant": Fusion(quantised(rms_norm), rewrite_rms_norm_quant, ("scale", RESULT)),
        "add_rms_norm": Fusion(Call(ops.rms_norm, total, WEIGHT, EPS), rewrite_add_rms_norm, ("total", RESULT)),
        "add_rms_norm_quant": Fusion(
            Call(ops.rms_norm_quant, total, WEIGHT, EPS), rewrite_add_rms_norm_quant, ("total", RESULT)
        ),
        "rope": Rope(),
        "bias": Fusion(BIASED, rewrite_bias),
        "packing": pack_linears,
        "rope_packing": RopePacking(),
        "swiglu": Fusion(SWIGLU, rewrite_swiglu),
        "linear": Linear(),
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
    """RMSNorm spelled out, or torch's."""
    x, weight, result = value(match["x"]), value(match["weight"]), value(match[RESULT])
    if weight.shape != x.shape[-1:] or x.dim() < 2:
        raise Refused(f"a weight {list(weight.shape)} is not for the last dimension of {list(x.shape)}")
    if not x.dtype == weight.dtype == result.dtype:
        raise Refused(f"input {x.dtype}, weight {weight.dtype} and result {result.dtype} differ")
    scale = match.bound.get("scale")  # None: torch's RMSNorm, which is one op
    in_float32 = scale is None or value(scale).dtype == torch.float32
    if not in_float32 or x.dtype == torch.float64 or match.dtypes - {x.dtype, torch.float32}:
        raise Refused("it is not computed in float32")
    return [rewriter.call(rewriter.ops.rms_norm, match["x"], match["weight"], match["eps"])]


def summands(rewriter: Rewriter, match: Match) -> tuple[Node, Node]:
    """(x, residual) of a sum. The kernel may write into the residual, so nothing may read the residual later."""
    total, pair = match["total"], [match["x"], match["residual"]]
    result = value(total)
    values = [value(node) for node in pair if isinstance(node, Node)]  # a number is no node
    are_alike = all(x.shape == result.shape and x.dtype == result.dtype for x in values)
    if len(values) < 2 or not are_alike:
        raise Refused("the summands are not of one shape and dtype")
    memory = rewriter.memory
    if memory.roots[pair[0]] & memory.roots[pair[1]]:
        raise Refused("the summands share memory")
    for residual in sorted(pair, key=memory.order.__getitem__):
        if memory.dies_at(residual, total) and 0 not in value(residual).stride():
            x = pair[1] if residual is pair[0] else pair[0]
            return x, residual
    raise Refused(f"{pair[0].name} and {pair[1].name} are both still needed, or not the graph's own")


def rewrite_add_rms_norm(rewriter: Rewriter, match: Match) -> Sequence[Node]:
    """RMSNorm of a sum."""
    both = rewriter.call(rewriter.ops.add_rms_norm, *summands(rewriter, match), match["weight"], match["eps"])
    normed, total = rewriter.parts(both, 2)
    return total, normed


def rewrite_add_rms_norm_quant(rewriter: Rewriter, match: Match) -> Sequence[Node]:
    """Quantised RMSNorm of a sum. The fused op's third result is the sum."""
    three = rewriter.call(rewriter.ops.add_rms_norm_quant, *summands(rewriter, match), match["weight"], match["eps"])
    return rewriter.call(operator.getitem, three, 2), three


# Dynamic quantisation to int8, with a scale for each token.


def quantised(normed: Call) -> Call:
    """The pattern of round(normed / scale), with scale = amax / 127."""
    wide = Cast(normed)
    keep = Some("keep")
    magnitude = Call(aten.abs.default, wide)
    largest = Either(
        Call(aten.amax.default, magnitude, [-1], keep),
        Call(operator.getitem, Call(aten.max.dim, magnitude, -1, keep), 0),
    )
    # A floor this small only prevents the division of a row of zeros by zero.
    floor = Some("floor", lambda found: is_number(found) and found <= torch.finfo(torch.float32).tiny)
    scale = Either(
        Call(aten.div.Tensor, Cast(largest), 127, name="scale"),
        Call(aten.clamp_min.default, Call(aten.div.Tensor, Cast(largest), 127), floor, name="scale"),
    )
    column = Either(scale, Call(aten.unsqueeze.default, scale, -1))
    quotient = Call(aten.div.Tensor, wide, column, name="quotient")
    low = Some("low", lambda found: found in (-127, -128))
    rounded = Either(
        Call(aten.clamp.default, Call(aten.round.default, quotient), low, 127),
        Call(aten.round.default, Call(aten.clamp.default, quotient, low, 127)),
    )
    return Call(aten._to_copy.default, rounded, torch.int8)


def rewrite_rms_norm_quant(rewriter: Rewriter, match: Match) -> Sequence[Node]:
    """Quantisation of an RMSNorm."""
    between = match.dtypes - {value(match["normed"]).dtype, torch.float32, torch.int8}
    if between or {value(match["scale"]).dtype, value(match["quotient"]).dtype} != {torch.float32}:
        raise Refused("it is not quantised in float32")
    pair = rewriter.call(rewriter.ops.rms_norm_quant, match["x"], match["weight"], match["eps"])
    codes, scale = rewriter.parts(pair, 2)
    shape = value(match["scale"]).shape
    if shape != value(scale).shape:
        scale = rewriter.call(aten.reshape.default, scale, static(shape))
    return scale, codes


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
        raise Refused(f"{match['bias'].name} is not of the shape or dtype of a bias")
    return [rewriter.call(aten.linear.default, match["x"], match["weight"], match["bias"])]


def pack_linears(rewriter: Rewriter) -> list[Change]:
    """Makes linear layers with the same input one layer with a stacked weight, followed by a split. The layer whose
    result goes into SiLU comes first, as ``swiglu`` wants it."""
    layers: dict[Node, list[Node]] = defaultdict(list)
    for node in rewriter.graph.nodes:
        if node.target is aten.linear.default:
            layers[node.args[0]].append(node)
    return [pack_group(rewriter, x, group) for x, group in layers.items() if len(group) > 1]


def pack_group(rewriter: Rewriter, x: Node, group: list[Node]) -> Change:
    """Packs linear layers of the input ``x``."""
    group = sorted(group, key=lambda node: aten.silu.default not in {user.target for user in node.users})
    names = tuple(node.name for node in group)
    line, memory = source_line(group[0]), rewriter.memory
    weights: list[Any] = [node.args[1] for node in group]
    biases: list[Any] = [node.args[2] if len(node.args) > 2 else None for node in group]
    num_biases = sum(bias is not None for bias in biases)

    def build(_: Match) -> Sequence[Node]:
        if num_biases not in (0, len(group)):
            raise Refused("some have a bias and some have none")
        stacks = [weights, biases] if num_biases else [weights]
        if not all(memory.is_constant(node) for stack in stacks for node in stack):
            raise Refused("a weight or a bias is no constant of the graph")
        if any(memory.roots[node] & memory.written for node in group):
            raise Refused("a result is written into")
        stacked = [rewriter.constant(torch.cat([rewriter.tensor(node) for node in stack])) for stack in stacks]
        whole = rewriter.call(aten.linear.default, x, *stacked)
        sizes = [value(node).shape[-1] for node in group]
        split = rewriter.call(aten.split_with_sizes.default, whole, sizes, -1)
        parts = rewriter.parts(split, len(group))
        keep_contiguous(rewriter, group)
        return parts

    try:
        return Change(rewriter.rewrite(Match({"x": x}, tuple(group)), group, build), line=line)
    except Refused as refusal:
        return Change(names, str(refusal), line)


def keep_contiguous(rewriter: Rewriter, layers: Sequence[Node]) -> None:
    """Inserts a contiguous copy where the graph returns a view of a result of ``layers``, or a foreign op reads one.

    Packing makes these results slices, whose views are no longer contiguous; callers and foreign kernels may need views
    that are."""
    for view in [node for node, roots in rewriter.memory.roots.items() if roots & set(layers)]:
        foreign = [user for user in view.users if user.op == "output" or is_foreign(user.target)]
        if foreign and value(view).is_contiguous():
            with rewriter.graph.inserting_after(view):
                whole = rewriter.call(aten.contiguous.default, view)
            for user in foreign:
                user.replace_input_with(view, whole)


def is_foreign(target: Any) -> bool:
    """Whether a node's target is an op of which only the schema is known: neither torch's nor ours."""
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
        if not rewriter.memory.is_constant(weight):
            raise Refused(f"{weight.name} is no constant of the graph")
        if len(shape) < 2:
            raise Refused(f"{x.name} is a single row")
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
    """SiLU of the first half times the second half."""
    if "x" not in match.bound:
        raise Refused("gate and up are not the halves of one tensor")
    return [rewriter.call(rewriter.ops.swiglu, match["x"])]
