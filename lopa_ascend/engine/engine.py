"""The engine: requests of token ids in, updates out, many requests in one step. It knows no text."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from lopa_ascend import checkpoint
from lopa_ascend.backend import Ops, load_ops
from lopa_ascend.backend.memory import default_kv_memory, free_memory
from lopa_ascend.config import DecodingParams, EngineConfig, Limits, ModelConfig, ParameterError
from lopa_ascend.decode import begin
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.engine.scheduler import Admission, Scheduler
from lopa_ascend.engine.scheduler import Sequence as Scheduled
from lopa_ascend.graph.setup import GraphPlan, graph_runner, plan_graphs
from lopa_ascend.kv.pages import PAGE_SIZE, PageTables, pages_for, slots_for
from lopa_ascend.kv.pool import KVPool
from lopa_ascend.kv.prefix_cache import PrefixCache, PrefixKey
from lopa_ascend.model.dream import Dream
from lopa_ascend.parallel.agreement import Agreement
from lopa_ascend.parallel.mesh import Mesh
from lopa_ascend.runner.eager import BatchState, Runner, SequenceState
from lopa_ascend.score.sampling import CANDIDATES
from lopa_ascend.text.tokenizer_files import load_tokenizer
from lopa_ascend.types import EngineStats, RankReport, Scoring, SequenceResult, Update


@dataclass
class _Request:
    """``shown`` tokens were reported; ``cached_tokens`` and ``model_tokens`` as in Update."""

    prompt: tuple[int, ...]
    params: DecodingParams
    trace: bool
    scheduled: Scheduled
    cached_tokens: int = 0
    shown: int = 0
    model_tokens: int = 0


class Engine:
    """A model with its KV pool and the requests that run on it. Everything is deterministic: the same calls in the same
    order give the same updates.

    Raises:
        CheckpointError, ConfigError, TokenizerError, ParameterError: this cannot be served; no weights were loaded.
        GraphError: there is no room for so many graphs; what a device has shows after the weights were loaded.
    """

    def __init__(self, config: EngineConfig, mesh: Mesh | None = None):
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        path = DEMO_MODEL if config.model is None else Path(config.model)
        self.config, self.mesh = config, mesh or Mesh()
        self.model_name = "demo" if config.model is None else path.resolve().name
        trouble = None
        try:
            ops, self._num_token_ids, max_model_len, graphs = self._examine(path)
        except (ValueError, OSError) as error:
            trouble = error
        self.mesh.raise_together(trouble)
        tp = self.mesh.tp
        shard = checkpoint.Shard(tp.rank, tp.size)
        self.model_config, weights = checkpoint.load(
            path, lora=config.lora, dtype=config.dtype, device=config.device, shard=shard
        )
        model = Dream(self.model_config, weights, ops, tp)
        del weights  # the model has its own where the device wants them in another form
        dtype = model.head.dtype
        kv_shape = self.model_config.kv_shape(tp.size)
        page_bytes = KVPool.page_bytes(kv_shape, dtype)
        num_pages = self.mesh.world.minimum(_num_pages(config, max_model_len, page_bytes), "start")
        spare = graphs.trash_pages if graphs else 0
        pool = KVPool(kv_shape, num_pages, dtype, config.device, spare)
        self.kv_cache_memory = pool.num_pages * page_bytes
        self.limits = Limits(
            vocab_size=self.model_config.vocab_size,
            mask_token_id=self.model_config.mask_token_id,
            max_model_len=max_model_len,
            num_pages=pool.num_pages,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=_max_tokens(config, max_model_len),
            max_num_branches=config.max_num_branches,
            max_top_k=CANDIDATES if tp.size > 1 else None,
            branch_parallel_size=self.mesh.bp.size,
            graph_mode=config.mode,
        )
        cache = PrefixCache(pool.allocator) if config.enable_prefix_caching else None
        self.scheduler = Scheduler(self.limits, pool.allocator, cache, config.approximate_prefix_caching)
        bp = self.mesh.bp
        if graphs is None:
            self.runner = Runner(model, pool, ops, bp)
        else:
            self.runner = graph_runner(config, graphs, model, pool, self._num_token_ids, bp)
        self._states: BatchState = {}
        self._requests: dict[str, _Request] = {}
        self._forward_seconds = 0.0
        self._agreement = Agreement(self.mesh, config.agreement_interval)
        # What may differ between machines.
        alike = replace(config, model=None, lora=None, threads=None, graph_cache=None)
        self.mesh.check_agreement(
            0, {"its configuration": alike, "its model": self.model_config, "its limits": self.limits}
        )
        self.ranks = self._report(model, page_bytes)
        self.mesh.start()

    def _examine(self, path: Path) -> tuple[Ops, int, int, GraphPlan | None]:
        """The device's ops, the number of token ids that exist, the longest sequence, and the graphs unless steps are
        eager; raises as the constructor does, before any weight is read."""
        config = self.config
        ops = load_ops(config)
        model = checkpoint.open_checkpoint(path).config
        sizes, wanted = model.tensor_parallel_sizes(), config.tensor_parallel_size
        if wanted not in sizes:
            choices = ", ".join(map(str, sizes))
            message = f"{wanted} does not split this model evenly; choose one of {choices}"
            raise ParameterError("tensor_parallel_size", message)
        tokenizer = load_tokenizer(path, model.vocab_size)
        num_token_ids = tokenizer.num_token_ids if tokenizer else model.vocab_size
        longest = _max_model_len(config, model)
        graphs = None
        if config.mode != "eager":
            made_of = model, num_token_ids, self.mesh.tp.rank, self.mesh.bp.rank
            graphs = plan_graphs(config, made_of, longest, _max_tokens(config, longest))
        return ops, num_token_ids, longest, graphs

    def _report(self, model: Dream, page_bytes: int) -> tuple[RankReport, ...]:
        """What every rank holds, by rank."""
        config = self.config
        held = {weight.data_ptr(): weight.nbytes for weight in (*model.weights.values(), model.head)}
        graphs = self.runner.graph_stats()
        own = RankReport(
            host=platform.node(),
            device=str(model.ops.device),
            weights=sum(held.values()),
            num_pages=self.limits.num_pages,
            page_bytes=page_bytes,
            num_graphs=graphs.num_buckets if graphs else 0,
            graphs=graphs.memory if graphs else 0,
            free=free_memory(config.device, config.world_size),
        )
        said = self.mesh.all_gather_text("memory", msgspec.json.encode(own).decode())
        return tuple(msgspec.json.decode(text, type=RankReport) for text in said)

    @property
    def dtype(self) -> str:
        return str(self.runner.model.head.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        return self.config.device

    # ---- requests --------------------------------------------------------------------------------------------------

    def add(self, request_id: str, prompt: Sequence[int], params: DecodingParams, *, trace: bool = False) -> None:
        """Queues a request.

        Raises:
            ParameterError: it could never run.
            ValueError: the id is in use.
        """
        if request_id in self._requests:
            raise ValueError(f"request id {request_id!r} is in use")
        self.limits.check(len(prompt), params)
        tables = PageTables(self.scheduler.allocator, self.limits.num_slots(params))
        scheduled = Scheduled(request_id, len(prompt), len(prompt) + params.max_new_tokens, tables)
        if self.scheduler.prefix_cache is not None:
            full = params.window_attention == "full"
            block = min(params.block_size, params.max_new_tokens) if full else 0
            scheduled.key = PrefixKey(tuple(prompt), params.window_attention, block)
        self._requests[request_id] = _Request(tuple(prompt), params, trace, scheduled)
        self.scheduler.add(scheduled)

    def abort(self, request_id: str) -> bool:
        """Ends a request now and gives its pages back; there is no update of it any more. False if there is none."""
        state = self._states.pop(request_id, None)
        if state is not None:
            self.runner.leave(state)
        if self._requests.pop(request_id, None) is None:
            return False
        return self.scheduler.remove(request_id)

    def has_work(self) -> bool:
        return bool(self._requests)

    def step(self) -> list[Update]:
        """Admits what may begin, makes one forward pass, and says what it made of every request that took part."""
        while (admission := self.scheduler.admit()) is not None:
            self._open(admission)
        plan = self.scheduler.plan()
        if plan is None:
            return []
        start = time.perf_counter()
        self._states, result = self.runner.step(self._states, plan)
        self._forward_seconds = time.perf_counter() - start
        self._agreement.record_step(plan, result)
        return [self._take(sequence) for sequence in result.sequences]

    def stats(self) -> EngineStats:
        scheduler, allocator = self.scheduler, self.scheduler.allocator
        cached = scheduler.prefix_cache.num_evictable if scheduler.prefix_cache else 0
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            pages_in_use=allocator.num_pages - allocator.num_free - cached,
            pages_cached=cached,
            num_pages=allocator.num_pages,
            num_steps=scheduler.num_steps,
            num_prefill_steps=scheduler.num_prefill_steps,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            copied_positions=self.runner.pool.copied_positions,
            gathered_bytes=self.runner.ops.gathered_bytes,
            forward_seconds=self._forward_seconds,
            num_rows=self.runner.num_rows,
            idle_rows=self.runner.idle_rows,
            traffic=self.mesh.traffic(),
            graphs=self.runner.graph_stats(),
        )

    def close(self, failure: str | None = None) -> None:
        """Leaves the other ranks, if there are any; they end if it is because of a ``failure`` here. The engine is of
        no use any more."""
        self.mesh.close(failure)

    # ---- pieces ----------------------------------------------------------------------------------------------------

    def _open(self, admission: Admission) -> None:
        scheduled, entry = admission.sequence, admission.entry
        request = self._requests[scheduled.request_id]
        request.cached_tokens = scheduled.committed
        config = self.model_config
        eos = config.eos_token_ids if request.params.eos_token_ids is None else request.params.eos_token_ids
        strategy = begin(request.prompt, request.params, config.mask_token_id, frozenset(eos), scheduled.committed)
        last = None if entry is None else entry.last
        state = self.runner.begin(strategy, self._scoring(request, eos), last)
        if entry is not None and entry.partial_page is not None:
            self._copy_partial(scheduled.page_tables, entry.pages, len(request.prompt))
        scheduled.demand = self.runner.demand(state)
        self._states[scheduled.request_id] = state

    def _copy_partial(self, tables: PageTables, pages: Sequence[int], length: int) -> None:
        """Gives every slot its own copy of an entry's last page, which growing may otherwise drop from the cache."""
        allocator = self.scheduler.allocator
        allocator.share(pages[-1])
        for slot, table in enumerate(tables.by_slot):
            tables.grow(slot, length)
            self.runner.pool.copy(pages, table, length // PAGE_SIZE * PAGE_SIZE, length)
        allocator.release(pages[-1])

    def _scoring(self, request: _Request, eos: tuple[int, ...]) -> Scoring:
        # What has no effect is left at its default, so that more requests are scored together.
        params, config = request.params, self.model_config
        late, seed = params.min_new_tokens > 0, self.config.seed if params.seed is None else params.seed
        return Scoring(
            confidence=params.confidence,
            mask=config.mask_token_id,
            num_token_ids=self._num_token_ids,
            eos=eos if late else (),
            min_position=len(request.prompt) + params.min_new_tokens if late else 0,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            seed=seed if params.temperature else 0,
        )

    def _take(self, result: SequenceResult) -> Update:
        request, state = self._requests[result.request_id], self._states[result.request_id]
        strategy, record = state.strategy, result.record
        if record is not None:
            request.model_tokens += record.model_tokens
            if request.scheduled.prefills and result.num_committed >= len(request.prompt):
                self._remember(request, state)
        self.scheduler.advance(result)
        tokens = strategy.final_tokens()
        new = slice(request.shown, len(tokens))
        finish_reason, stop = None, None
        if result.error is not None:
            finish_reason = "error"
        elif result.next_demand is None:
            stop = strategy.eos_reached()
            finish_reason = "length" if stop is None else "stop"
        if finish_reason is not None:
            del self._requests[result.request_id], self._states[result.request_id]
        request.shown = len(tokens)
        return Update(
            request_id=result.request_id,
            token_ids=tuple(tokens[new]),
            max_probs=tuple(strategy.winner.probs[new]),
            num_forwards=strategy.num_forwards,
            num_positions=len(strategy.winner.tokens),
            model_tokens=request.model_tokens,
            winner=None if record is None else (record.winner + 1) % len(record.branches),
            cached_tokens=request.cached_tokens,
            finish_reason=finish_reason,
            stop_token_id=stop,
            error=result.error,
            record=record if request.trace else None,
        )

    def _remember(self, request: _Request, state: SequenceState) -> None:
        """Puts a prompt that was just computed into the prefix cache, unless all pages are in use."""
        cache, key = self.scheduler.prefix_cache, request.scheduled.key
        if cache is None or key is None:
            return
        table, length = request.scheduled.page_tables.by_slot[0], len(request.prompt)
        pages = cache.take_pages(key, table)
        if pages is not None:
            self.runner.pool.copy(table, pages, length // PAGE_SIZE * PAGE_SIZE, length)
            cache.insert(key, pages, state.last)


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    limit = model.max_position_embeddings
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        message = f"must be from 1 to the model's {limit} positions, got {config.max_model_len}"
        raise ParameterError("max_model_len", message)
    return config.max_model_len


def _max_tokens(config: EngineConfig, max_model_len: int) -> int:
    """Of one step."""
    return config.max_num_batched_tokens or max(4096, max_model_len)


def _num_pages(config: EngineConfig, max_model_len: int, page_bytes: int) -> int:
    if config.kv_cache_memory is not None:
        if config.kv_cache_memory < page_bytes:
            message = f"must hold at least one page of {page_bytes} bytes, got {config.kv_cache_memory}"
            raise ParameterError("kv_cache_memory", message)
        return config.kv_cache_memory // page_bytes
    usual_slots = slots_for(1 + DecodingParams().lookaheads, config.branch_parallel_size)
    useful = config.max_num_seqs * usual_slots * pages_for(max_model_len)
    return max(1, min(useful, default_kv_memory(config.device, config.world_size) // page_bytes))
