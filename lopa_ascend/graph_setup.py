"""From an engine's configuration to its graphs."""

from __future__ import annotations

from dataclasses import dataclass

from tqdm import tqdm

from lopa_ascend.config import EngineConfig
from lopa_ascend.graph.buckets import Bucket, Buckets, declare
from lopa_ascend.graph.compile import load_compiler
from lopa_ascend.graph_runner import GraphRunner
from lopa_ascend.kv import KVPool
from lopa_ascend.launcher import Graphs
from lopa_ascend.model.dream import Dream
from lopa_ascend.pages import PAGE_SIZE, pages_for, slots_for
from lopa_ascend.parallel.collectives import Group
from lopa_ascend.score_graph import GreedyScore
from lopa_ascend.step_inputs import Kind


@dataclass(frozen=True)
class GraphPlan:
    """What graphs an engine has, before there is memory for them. ``trash_pages`` of the pool belong to nobody: what no
    sequence needs is written there."""

    shape: Bucket
    buckets: Buckets

    @property
    def trash_pages(self) -> int:
        return pages_for(max(bucket.tokens for bucket in self.buckets.declared))


def plan_graphs(config: EngineConfig, max_model_len: int, max_tokens: int) -> GraphPlan:
    """For at most ``max_tokens`` a step on a rank."""
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
    return GraphPlan(shape, declare(shape, max_tokens))


def graph_runner(
    config: EngineConfig, plan: GraphPlan, model: Dream, pool: KVPool, num_tokens: int, bp: Group
) -> GraphRunner:
    """A runner whose graphs are compiled, with a progress bar. ``num_tokens``: ids from there on do not exist.

    Raises:
        GraphError: the mode has no room for so many graphs, or the device has not.
    """
    kind, tp = Kind(config.graph_window_attention, config.graph_confidence), model.tp
    # What a step is made of besides the shapes of its tensors and this code.
    parts = model.config, model.head.dtype, (tp.rank, tp.size), (bp.rank, bp.size), kind, num_tokens
    key = repr((*parts, config.attention_layout))
    compiler = load_compiler(config.device, config.mode, key=key, cache_dir=config.graph_cache)
    compiler.check_buckets([bucket.name for bucket in plan.buckets.declared])
    ids = range(model.first_token, model.first_token + model.num_tokens)
    graphs = Graphs(
        shape=plan.shape,
        buckets=plan.buckets,
        kind=kind,
        compiler=compiler,
        score=GreedyScore(ids, model.config.mask_token_id, num_tokens, tp, model.ops.device, kind.confidence),
        num_seats=config.max_num_seqs,
        trash=pool.num_pages * PAGE_SIZE,
        ahead=config.async_scheduling and not plan.shape.full,
    )
    runner = GraphRunner(model, pool, model.ops, graphs, bp)
    launchers = list(runner.launchers.values())
    runner.warm_up(tqdm(launchers, desc=f"{compiler.mode} graphs", disable=None))
    return runner
