"""From an engine's configuration to its compiled steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from lopa_ascend.backend.compiler import Compiler
from lopa_ascend.config import EngineConfig, ModelConfig, ParameterError
from lopa_ascend.graph.buckets import Bucket, Buckets, declare
from lopa_ascend.graph.check import StepCheck
from lopa_ascend.graph.compile import load_compiler
from lopa_ascend.graph.executor import GraphExecutor
from lopa_ascend.graph.forwards import Forwards, PassKind, PassShape, declare_rows
from lopa_ascend.graph.launcher import Graphs
from lopa_ascend.kv.pages import PAGE_SIZE, pages_for, slots_for
from lopa_ascend.kv.pool import KVPool
from lopa_ascend.model.base import Model
from lopa_ascend.parallel.collectives import Group
from lopa_ascend.process.progress import progress
from lopa_ascend.score.greedy import GreedyScore
from lopa_ascend.types import ModelProperties


class _Compiled(Protocol):
    @property
    def bucket(self) -> Bucket | PassShape: ...


L = TypeVar("L", bound=_Compiled)
logger = logging.getLogger(__name__)

SMALL_WINDOWS = (
    "graphs have windows of at most %d blocks, and not of %d as graph_window_blocks says, because "
    "max_num_batched_tokens is %d; steps with larger windows are eager"
)
ESTIMATE = (
    "graph_mode %s: %d graphs of %d layers are compiled in about %.0f minutes of CPU time; those in --graph-cache take "
    "seconds"
)


@dataclass(frozen=True)
class GraphPlan:
    """An engine's graphs, none compiled yet, and their compiler."""

    shape: Bucket
    steps: tuple[Bucket, ...]
    """Decode steps, cheapest first; none for a causal model."""
    forwards: tuple[PassShape, ...]
    compiler: Compiler

    @property
    def declared(self) -> tuple[Bucket, ...] | tuple[PassShape, ...]:
        return self.steps or self.forwards

    @property
    def num_padding_pages(self) -> int:
        """Pages that the KV pool needs besides, for keys and values of padding rows and cells."""
        return pages_for(max(bucket.writes for bucket in self.declared))

    @property
    def num_attention_pages(self) -> int:
        """Pages with which one attention kernel of an NPU can take the largest step: one for each place in its page
        tables. With fewer, each layer takes several launches."""
        return max(math.prod(bucket.shape("all_entries pages")) for bucket in self.declared)

    def score_memory(self, vocabulary: int, dtype: torch.dtype, confidence: str, has_kernel: bool) -> int:
        """Bytes of the largest step's scores: its logits and, without a kernel that reads these once (``has_kernel``:
        ``Ops.row_stats``), two or three float32 tensors of that size. ``vocabulary``: token ids of this rank."""
        num_rows = max(bucket.tokens for bucket in self.declared)
        num_tensors = 0 if has_kernel else 3 if confidence == "neg_entropy" else 2
        return num_rows * vocabulary * (dtype.itemsize + num_tensors * torch.float32.itemsize)

    def activation_memory(self, model: ModelConfig, ranks: int, dtype: torch.dtype) -> int:
        """Bytes of an MLP in the largest step, on one of ``ranks`` that split the model: gate, up, SwiGLU's result, and
        hidden states before and after."""
        widths, experts = [model.intermediate_size], model.experts
        if experts is not None:
            widths.append(experts.per_token * experts.inner + experts.shared_inner)
        num_rows = max(bucket.tokens for bucket in self.declared)
        return num_rows * (3 * max(widths) // ranks + 4 * model.hidden_size) * dtype.itemsize


def plan_graphs(
    config: EngineConfig,
    identity: object,
    properties: ModelProperties,
    max_model_len: int,
    max_tokens: int,
    max_queries: int | None = None,
) -> GraphPlan:
    """Chooses the buckets of an engine and loads its compiler. The ``repr`` of ``identity`` tells cached graphs apart,
    beside the configuration.

    Raises:
        GraphError: the graph mode has no room for so many graphs.
        ParameterError: the largest window has fewer positions than a graph has branches.
    """
    shape = _largest(config, properties, max_model_len, max_queries)
    forwards = _rows(config, shape, max_tokens) if properties.is_causal else ()
    params = config.graph_params
    key = repr((identity, config.dtype, config.tensor_parallel_size, config.branch_parallel_size, params))
    compiler = load_compiler(
        config.device, config.graph_mode, key=f"{key} {config.attention_layout}", cache_dir=config.graph_cache
    )
    steps = () if properties.is_causal else _windows(config, shape, max_tokens, packs=compiler.packs)
    plan = GraphPlan(shape, steps, forwards, compiler)
    compiler.check_buckets([bucket.name for bucket in plan.declared])
    return plan


def _largest(config: EngineConfig, properties: ModelProperties, max_model_len: int, max_queries: int | None) -> Bucket:
    params = config.graph_params
    slots = slots_for(1 + params.num_branches, config.branch_parallel_size)
    block_length = min(params.block_size, max_model_len)
    blocks = min(config.graph_window_blocks, -(-max_model_len // block_length))
    return Bucket(
        sequences=config.max_num_seqs,
        blocks=blocks,
        pages=pages_for(max_model_len),
        branches=slots * config.branch_parallel_size,
        slots=slots,
        block_length=block_length,
        max_blocks=blocks,
        full_attention=params.window_attention == "full",
        max_queries=max_queries,
        logit_shift=properties.logit_shift,
    )


def _windows(config: EngineConfig, shape: Bucket, max_tokens: int, *, packs: bool) -> tuple[Bucket, ...]:
    """The buckets of decode steps (``buckets.declare``). ParameterError as in ``plan_graphs``."""
    if shape.cells < shape.branches:
        message = (
            f"{shape.blocks} blocks of {shape.block_length} positions are fewer positions than the {shape.branches} "
            "branches of a graph; choose more or longer blocks (block_size), or fewer branches (num_branches)"
        )
        raise ParameterError("graph_window_blocks", message)
    declared = declare(shape, max_tokens, packs=packs).declared
    most_blocks = max(bucket.blocks for bucket in declared)
    if most_blocks < shape.blocks:
        logger.info(SMALL_WINDOWS, most_blocks, shape.blocks, max_tokens)
    return declared


def _rows(config: EngineConfig, shape: Bucket, max_tokens: int) -> tuple[PassShape, ...]:
    """The buckets of forward passes. In a pass over a block a sequence has a row for each branch; a pass that drafts or
    commits has one row."""
    drafts = config.graph_params.drafts
    kinds = {PassKind(shape.block_length, False, drafts): config.max_num_seqs * (1 if drafts else shape.slots)}
    if shape.block_length > 1:
        kinds[PassKind(shape.block_length, is_causal=True)] = config.max_num_seqs
    largest = PassShape(config.max_num_seqs, shape.block_length, False, shape.slots, shape.pages, shape.max_queries)
    return declare_rows(kinds, largest, max_tokens)


def build_executor(
    config: EngineConfig, plan: GraphPlan, model: Model, pool: KVPool, num_token_ids: int, bp: Group
) -> GraphExecutor:
    """Compiles the planned graphs, with a progress bar. Token ids from ``num_token_ids`` on do not exist. GraphError if
    the device has no room for so many graphs, or computes something else in one."""
    own_ids = range(model.first_token_id, model.first_token_id + model.local_vocab_size)
    mask = model.config.mask_token_id
    graphs = Graphs(
        shape=plan.shape,
        buckets=Buckets(plan.steps),
        params=config.graph_params,
        compiler=plan.compiler,
        score=GreedyScore(own_ids, mask, num_token_ids, model.tp, model.ops, config.graph_params.confidence),
        num_seats=config.max_num_seqs,
        first_padding_position=pool.num_pages * PAGE_SIZE,
        ahead=not plan.shape.full_attention,
    )
    executor = GraphExecutor(model, pool, graphs, bp)
    check = _check(plan, model, pool, num_token_ids)
    launchers = _largest_first(executor.launchers.values())
    if plan.compiler.rehearses:
        executor.rehearse(launchers)
    executor.warm_up(_announced(plan, launchers, model), check)
    return executor


def build_forwards(plan: GraphPlan, model: Model, pool: KVPool, num_token_ids: int, bp: Group) -> Forwards:
    """Compiles the planned forward passes, like ``build_executor``."""
    forwards = Forwards(plan.forwards, plan.compiler, model, pool, bp.size)
    check = _check(plan, model, pool, num_token_ids)
    launchers = _largest_first(forwards.launchers.values())
    if plan.compiler.rehearses:
        forwards.rehearse(launchers)
    forwards.warm_up(_announced(plan, launchers, model), check)
    return forwards


def _check(plan: GraphPlan, model: Model, pool: KVPool, num_token_ids: int) -> StepCheck | None:
    is_compiled = plan.compiler.mode != "eager"
    return StepCheck(plan.compiler, model, pool, num_token_ids) if is_compiled else None


def _largest_first(launchers: Iterable[L]) -> list[L]:
    """The order of captures. Graphs of one pool reuse memory that earlier ones have left, if it is large enough: in
    this order the pool grows to what the largest step needs, in the other to the sum."""
    return sorted(launchers, key=lambda launcher: launcher.bucket.tokens, reverse=True)


def _announced(plan: GraphPlan, launchers: list[L], model: Model) -> Iterable[L]:
    compiler, count, num_layers = plan.compiler, len(launchers), model.config.num_layers
    if compiler.warning is not None:
        logger.warning(compiler.warning, count)
    if compiler.seconds_to_compile is not None:
        any_model, layer = compiler.seconds_to_compile
        minutes = count * (any_model + num_layers * layer) / 60
        logger.info(ESTIMATE, compiler.mode, count, num_layers, minutes)
    return progress(launchers, f"compiling with {compiler.mode}", count, "graph")
