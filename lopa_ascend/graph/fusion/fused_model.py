"""A model in plain torch as the engine runs it: its graph, rewritten to fused ops."""

from __future__ import annotations

import logging

from torch import Tensor, nn
from torch.fx import GraphModule

from lopa_ascend.backend.interface import Ops
from lopa_ascend.config import ModelConfig
from lopa_ascend.graph.fusion import Report, fuse
from lopa_ascend.graph.fusion.bind import bind_attend, bind_rows
from lopa_ascend.graph.fusion.trace import Trace
from lopa_ascend.model.base import Caches, ForwardInputs
from lopa_ascend.parallel.collectives import ALONE
from lopa_ascend.types import DREAM, ModelProperties, Traffic

logger = logging.getLogger(__name__)


class FusedModel:
    """A model in plain torch, on one rank (``model.base.Model``). ``graph(tokens, positions, attend, rows)`` gives the
    hidden states; ``head`` is the LM head's weight and bias, not yet stored as the backend wants them.

    One graph serves all steps: it holds for any number of tokens, so an eager step runs it as it is, and a compiled
    step is compiled from it for the tokens of its bucket. So both compute the same, and the weights are there once.
    """

    properties: ModelProperties = DREAM

    def __init__(
        self, config: ModelConfig, graph: GraphModule, head: tuple[Tensor, Tensor | None], ops: Ops, report: Report
    ):
        self.config, self.ops, self.tp, self.graph, self.report = config, ops, ALONE, graph, report
        weight, self.head_bias = head
        self.head = ops.packed(ops.stored(weight))
        self.weights = dict(graph.named_buffers())
        if self.head_bias is not None:
            self.weights["lm_head.bias"] = self.head_bias
        self.first_token_id, self.local_vocab_size = 0, config.vocab_size

    def forward(self, inputs: ForwardInputs, k_caches: Caches, v_caches: Caches) -> Tensor:
        ops = self.ops

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            ops.kv_write(k, v, k_caches[layer], v_caches[layer], inputs.slot_mapping, inputs.source)
            return ops.attention(q, k_caches[layer], v_caches[layer], inputs.entries)

        hidden: Tensor = self.graph(inputs.tokens, inputs.positions, attend, inputs.rows)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.ops.linear(hidden, self.head, self.head_bias)

    def traffic(self, num_computed: int) -> tuple[Traffic, ...]:
        return ()


def fuse_model(
    config: ModelConfig, module: nn.Module, trace: Trace, tensors: dict[str, Tensor], ops: Ops
) -> FusedModel:
    """A plain model with its weights, fused. The log says in one line what was fused and what was not, as a warning if
    something resembled a fused op and was left; the whole report is at level DEBUG.

    ``module``'s own tensors are not used, but for buffers that no checkpoint holds. ``tensors`` has parameters and
    persistent buffers on the device; it is emptied, so that a weight's memory is free once the weight is packed.
    """
    saved = module.state_dict().keys()
    tensors |= {name: buffer.to(ops.device) for name, buffer in module.named_buffers() if name not in saved}
    head = tensors["lm_head.weight"], tensors.get("lm_head.bias")
    graph = trace.module(tensors)
    tensors.clear()
    report = fuse(graph, ops)
    bind_attend(graph)
    bind_rows(graph, ops)
    level = logging.WARNING if report.refused else logging.INFO
    logger.log(level, "model_type %r: %s", config.model_type, report.summary())
    logger.debug("%s", report)
    return FusedModel(config, graph, head, ops, report)
