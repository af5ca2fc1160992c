"""What is decided before an engine is built: all checks that need no weights, so that a wrong setting is refused early;
then, with the weights in memory, the size of the KV pool and the limits of requests."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

from lopa_ascend.admission import Limits
from lopa_ascend.backend import find_device
from lopa_ascend.backend.interface import Ops
from lopa_ascend.checkpoint import with_dtype
from lopa_ascend.config import DecodingParams, EngineConfig, ModelConfig, ParameterError
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.engine.answers import Answer, read_answers
from lopa_ascend.engine.models import ModelSource, open_model
from lopa_ascend.families import FAMILIES
from lopa_ascend.graph.setup import GraphPlan, plan_graphs
from lopa_ascend.kv.pages import pages_for, slots_for
from lopa_ascend.model.base import Model
from lopa_ascend.parallel.mesh import Mesh
from lopa_ascend.score.shards import MAX_OFFERED
from lopa_ascend.text.special_ids import check_special_ids, end_token_ids
from lopa_ascend.text.tokenizer import Tokenizer
from lopa_ascend.text.tokenizer_files import load_vocabulary

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    model_source: ModelSource
    ops: Ops
    tokenizer: Tokenizer | None
    num_token_ids: int
    """The tokenizer's; the embedding may have more rows."""
    eos_token_ids: tuple[int, ...]
    """They end an answer unless a request sets its own."""
    max_model_len: int
    """Positions of the longest sequence."""
    max_num_batched_tokens: int
    """Most tokens of a step on a rank."""
    graph_plan: GraphPlan | None
    """None in eager mode."""
    answers: tuple[Answer, ...]
    """From the configured file; on rank 0 alone."""
    attention_layout: str
    """The one that computes rightly on this rank."""


def model_path(config: EngineConfig) -> Path:
    return DEMO_MODEL if config.model is None else Path(config.model)


def prepare(config: EngineConfig, mesh: Mesh) -> Prepared:
    """Checks a configuration against the device and the model's directory, without reading a weight.

    Raises:
        CheckpointError, ConfigError, ModelError, TokenizerError, ParameterError: the model cannot be served with this
            configuration.
        UnsupportedStackError: the software of the device is missing or too old.
        WrongKernelError: an NPU does not compute rightly.
        GraphError: the graph mode has no room for so many graphs, or an NPU hangs.
        OSError: a file cannot be read.
    """
    _check_profile_dir(config)
    path = model_path(config)
    device = find_device(config.device)
    ops = device.load_ops(config)
    model_source = open_model(path, config, ops.device)
    model = model_source.config
    config.check_split(model)
    answers = read_answers(config, path, model) if mesh.rank == 0 else ()
    tokenizer, eos_token_ids = load_vocabulary(path, model.vocab_size), model.eos_token_ids
    if tokenizer is not None:
        check_special_ids(tokenizer, path, model.mask_token_id, eos_token_ids)
        family = FAMILIES.get(model.model_type)
        eos_token_ids = end_token_ids(tokenizer, model.mask_token_id, eos_token_ids, family)
    num_token_ids = tokenizer.num_token_ids if tokenizer else model.vocab_size
    max_model_len = choose_max_model_len(config, model)
    max_num_batched_tokens = config.batched_tokens(max_model_len)
    is_causal = model_source.properties.is_causal
    stated = with_dtype(model, config.dtype)
    codes = model_source.codes
    ops, layout = device.checked_ops(ops, config, stated, max_model_len, is_causal=is_causal, codes=codes)
    config = replace(config, attention_layout=layout)
    weight_bytes = model_source.weight_bytes(config.tensor_parallel_size)
    device.check_memory(weight_bytes, config.world_size, config.gpu_memory_utilization)
    graph_plan = None
    if config.graph_mode != "eager":
        identity = model_source.identity, max_model_len, num_token_ids, mesh.tp.rank, mesh.bp.rank
        properties = model_source.properties
        graph_plan = plan_graphs(config, identity, properties, max_model_len, max_num_batched_tokens, ops.max_queries)
    return Prepared(
        model_source,
        ops,
        tokenizer,
        num_token_ids,
        eos_token_ids,
        max_model_len,
        max_num_batched_tokens,
        graph_plan,
        answers,
        layout,
    )


def _check_profile_dir(config: EngineConfig) -> None:
    if config.profile_dir is None:
        return
    try:
        Path(config.profile_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ParameterError("profile_dir", f"{config.profile_dir} cannot be a folder ({error.strerror})") from error
    if not os.access(config.profile_dir, os.W_OK | os.X_OK):
        raise ParameterError("profile_dir", f"this user may not write to {config.profile_dir}")


def choose_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """``EngineConfig.longest_sequence``; logs a larger limit of the model."""
    chosen, limit = config.longest_sequence(model), model.max_position_embeddings
    if config.max_model_len is None and limit > chosen:
        logger.info("max_model_len is %d; the model allows up to %d positions", chosen, limit)
    return chosen


# ---- with the weights loaded ---------------------------------------------------------------------------------------


def choose_num_pages(config: EngineConfig, prepared: Prepared, model: Model, page_bytes: int) -> int:
    """Pages of this rank's KV pool. ParameterError if the configured memory, or share of it, holds no page.

    The default is what a full server with the usual number of branches can use; on an NPU with graphs, enough for one
    kernel to attend for a whole step; at most what fits in memory.
    """
    if config.kv_cache_memory is not None:
        if config.kv_cache_memory < page_bytes:
            message = f"must hold at least one page of {page_bytes} bytes, got {config.kv_cache_memory}"
            raise ParameterError("kv_cache_memory", message)
        return config.kv_cache_memory // page_bytes
    usual_slots = slots_for(1 + DecodingParams().lookaheads, config.branch_parallel_size)
    most_slots = slots_for(1 + config.max_num_branches, config.branch_parallel_size)
    useful = max(config.max_num_seqs * usual_slots, most_slots) * pages_for(prepared.max_model_len)
    device, reserved, graphs = find_device(config.device), 0, prepared.graph_plan
    if graphs is not None:
        confidence, has_kernel = config.graph_params.confidence, prepared.ops.row_stats is not None
        scores = graphs.score_memory(model.local_vocab_size, model.head.dtype, confidence, has_kernel)
        activations = graphs.activation_memory(model.config, config.tensor_parallel_size, model.head.dtype)
        # Graphs keep both; a prompt of as many tokens, op by op, has activations beside them.
        reserved = graphs.num_padding_pages * page_bytes + scores + 2 * activations
        if device.wants_all_pages:
            useful = max(useful, graphs.num_attention_pages)
    share = config.gpu_memory_utilization
    affordable = device.kv_memory(config.world_size, reserved, share) // page_bytes
    if share is not None and not affordable:
        message = f"a share of {share:g} leaves no KV page beside the weights and a step; choose more"
        raise ParameterError("gpu_memory_utilization", message)
    return max(1, min(useful, affordable))


def request_limits(config: EngineConfig, prepared: Prepared, model: ModelConfig, num_pages: int) -> Limits:
    return Limits(
        vocab_size=model.vocab_size,
        mask_token_id=model.mask_token_id,
        max_model_len=prepared.max_model_len,
        num_pages=num_pages,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=prepared.max_num_batched_tokens,
        max_num_branches=config.max_num_branches,
        max_top_k=MAX_OFFERED if config.tensor_parallel_size > 1 else None,
        branch_parallel_size=config.branch_parallel_size,
        graph_mode=config.graph_mode,
        num_token_ids=prepared.num_token_ids,
        eos_token_ids=model.eos_token_ids,
        properties=prepared.model_source.properties,
    )
