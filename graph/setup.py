"""From an engine's configuration to its graphs."""

from __future__ import annotations

from dataclasses import dataclass

from tqdm import tqdm

from lopa_ascend.backend.compiler import Compiler
from lopa_ascend.config import EngineConfig
from lopa_ascend.graph.buckets import Bucket, Buckets, declare
from lopa_ascend.graph.compile import load_compiler
from lopa_ascend.graph.inputs import Kind
from lopa_ascend.graph.launcher import Graphs
from lopa_ascend.graph.runner import GraphRunner
from lopa_ascend.graph.score import GreedyScore
from lopa_ascend.kv.pages import PAGE_SIZE, pages_for, slots_for
from lopa_ascend.kv.pool import KVPool
from lopa_ascend.model.dream import Dream
from lopa_ascend.parallel.collectives import Group


@dataclass(frozen=True)
class GraphPlan:
    """What graphs an engine has, and the compiler that makes them. ``trash_pages`` of the pool belong to nobody: what
    no sequence needs is written there."""

    shape: Bucket
    buckets: Buckets
    compiler: Compiler

    @property
    def trash_pages(self) -> int:
        return pages_for(max(bucket.tokens for bucket in self.buckets.declared))


def plan_graphs(config: EngineConfig, made_of: object, max_model_len: int, max_tokens: int) -> GraphPlan:
    """For at most ``max_tokens`` a step on a rank. Nothing is compiled yet. ``made_of``: what graphs depend on besides
    the configuration.

    Raises:
        GraphError: the mode has no room for so many graphs.
    """
    slots = slots_for(1 + config.graph_num_branches, config.branch_parallel_size)
    length = min(config.graph_block_size, max_model_len)
    blocks = min(config.graph_window_blocks, -(-max_model_len // length))
    shape = Bucket(
        sequences=config.max_num_seqs,
        blocks=blocks,
        pages=pages_for(max_model_len),
        branches=slots * config.branch_parallel_size,
        slots=slots,
        length=length,
        capacity=blocks,
        full=config.graph_window_attention == "full",
    )
    buckets = declare(shape, max_tokens)
    key = repr((made_of, config.dtype, config.tensor_parallel_size, config.branch_parallel_size, _kind(config)))
    compiler = load_compiler(
        config.device, config.mode, key=f"{key} {config.attention_layout}", cache_dir=config.graph_cache
    )
    compiler.check_buckets([bucket.name for bucket in buckets.declared])
    return GraphPlan(shape, buckets, compiler)


def _kind(config: EngineConfig) -> Kind:
    return Kind(config.graph_window_attention, config.graph_confidence)


def graph_runner(
    config: EngineConfig, plan: GraphPlan, model: Dream, pool: KVPool, num_token_ids: int, bp: Group
) -> GraphRunner:
    """A runner whose graphs are compiled, with a progress bar. ``num_token_ids``: ids from there on do not exist.

    Raises:
        GraphError: the device has no room for so many graphs.
    """
    kind, ids = _kind(config), range(model.first_token_id, model.first_token_id + model.local_vocab_size)
    graphs = Graphs(
        shape=plan.shape,
        buckets=plan.buckets,
        kind=kind,
        compiler=plan.compiler,
        score=GreedyScore(ids, model.config.mask_token_id, num_token_ids, model.tp, model.ops.device, kind.confidence),
        num_seats=config.max_num_seqs,
        trash=pool.num_pages * PAGE_SIZE,
        ahead=config.async_scheduling and not plan.shape.full,
    )
    runner = GraphRunner(model, pool, model.ops, graphs, bp)
    launchers = list(runner.launchers.values())
    runner.warm_up(tqdm(launchers, desc=f"{plan.compiler.mode} graphs", disable=None))
    return runner
