"""The engine: requests of token ids in, updates out, many requests in one step. It knows no text."""

from __future__ import annotations

import platform
import random
import secrets
import time
from collections.abc import Sequence as List
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from lopa_ascend.backend.errors import is_out_of_memory
from lopa_ascend.backend.memory import free_memory
from lopa_ascend.config import DecodingParams, EngineConfig, ParameterError
from lopa_ascend.config.sizes import format_size
from lopa_ascend.engine.prepare import Prepared, choose_num_pages, model_name, prepare, request_limits
from lopa_ascend.engine.scheduler import Scheduler
from lopa_ascend.engine.sequences import SequenceFactory
from lopa_ascend.engine.updates import make_update
from lopa_ascend.graph.setup import build_executor
from lopa_ascend.kv.pool import KVPool
from lopa_ascend.kv.prefix_cache import PrefixCache
from lopa_ascend.model.base import Model
from lopa_ascend.parallel.agreement import Agreement
from lopa_ascend.parallel.collectives import RankError
from lopa_ascend.parallel.mesh import Mesh
from lopa_ascend.runner.eager import EagerExecutor
from lopa_ascend.runner.runner import Runner
from lopa_ascend.sequence import Request, Sequence
from lopa_ascend.types import EngineStats, RankReport, SequenceResult, StepPlan, Update

SEED_BITS = 53
"""Bits of a seed that is drawn: few enough that every JSON client can send the seed back unchanged."""
INTERRUPTED = "a step was interrupted, such as by Ctrl-C; the requests that ran then cannot go on"
"""The error of such a request."""
NO_MEMORY = "there was no memory for a step; requests with fewer branches or tokens need less"
"""The error of the requests in such a step."""


class Engine:
    """A model with its KV pool and the requests that run on it. Deterministic: the same calls in the same order give
    the same updates.

    Attributes:
        limits: what a request may ask for.
        model_name: the name of the model's directory, or "demo".
        kv_cache_memory: bytes of the KV pool on this rank.
        ranks: what every rank holds, by rank.
        seed: the configured seed, or the one that was drawn instead; the same on every rank.

    Args:
        mesh: this rank's place among others; None: the engine has one rank.

    Raises:
        CheckpointError, ConfigError, ModelError, TokenizerError, UnsupportedStackError: the model or the device's
            software cannot be used. No weights were loaded, unless their values are wrong, such as NaN.
        ParameterError: a setting cannot be used. No weights were loaded, unless it is ``kv_cache_memory``.
        StartError: another rank cannot serve.
        GraphError: there is no room for so many graphs. The device may show that only once the weights are loaded.
    """

    def __init__(self, config: EngineConfig, mesh: Mesh | None = None) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.config, self.mesh = config, mesh or Mesh()
        self.model_name = model_name(config)
        prepared = self._prepare()
        model = prepared.model_source.load(prepared.ops, self.mesh.tp, prepared.max_model_len)
        self.model_config = replace(model.config, eos_token_ids=prepared.eos_token_ids)
        tensors = *model.weights.values(), model.head
        matrices = [w for w in tensors if w.dim() == 2 and (w.is_floating_point() or w.dtype == torch.int8)]
        self._linear = prepared.ops.settle(matrices)
        pool, page_bytes = self._make_pool(model, prepared)
        self.kv_cache_memory = pool.num_pages * page_bytes
        self.limits = request_limits(config, prepared, self.model_config, pool.num_pages)
        self.runner = self._make_runner(model, pool, prepared)
        prefix_cache = PrefixCache(pool.allocator) if config.enable_prefix_caching else None
        begin = SequenceFactory(self.runner, self.model_config, prepared.num_token_ids)
        approximate = config.approximate_prefix_caching
        self.scheduler = Scheduler(self.limits, pool.allocator, begin, prefix_cache, approximate=approximate)
        self._step_seconds = 0.0
        self._open_step: dict[str, Sequence] | None = None
        """The sequences by request id that run in a step, from its beginning until all its updates are made; otherwise
        None. If the step is interrupted, the next one ends these requests."""
        self._agreement = Agreement(self.mesh, config.agreement_interval)
        # Without the settings that may differ between machines.
        shared = replace(config, model=None, lora=None, threads=None, graph_cache=None)
        self.mesh.check_agreement(
            0, {"its configuration": shared, "its model": self.model_config, "its limits": self.limits}
        )
        self.seed = self._choose_seed()
        self._seeds = random.Random(self.seed)
        self.ranks = self._report(model, page_bytes)
        self.mesh.start()

    # ---- construction ----------------------------------------------------------------------------------------------

    def _prepare(self) -> Prepared:
        """Calls ``prepare`` on every rank. If it raises on one of them, all ranks raise."""
        prepared, refusal = None, None
        try:
            prepared = prepare(self.config, self.mesh)
        except (ValueError, OSError) as error:
            refusal = error
        self.mesh.raise_together(refusal)
        assert prepared is not None
        return prepared

    def _make_pool(self, model: Model, prepared: Prepared) -> tuple[KVPool, int]:
        """The KV pool, which has the same number of pages on every rank, and the bytes of a page.

        Raises:
            ParameterError: the device has no memory for the pool.
        """
        shape, dtype = model.config.kv_shape(model.tp.size), model.head.dtype
        page_bytes = KVPool.page_bytes(shape, dtype)
        own_pages = choose_num_pages(self.config, prepared, model, page_bytes)
        num_pages = self.mesh.world.minimum(own_pages, "start")
        num_padding_pages = prepared.graph_plan.num_padding_pages if prepared.graph_plan else 0
        try:
            return KVPool(shape, num_pages, dtype, self.config.device, num_padding_pages), page_bytes
        except RuntimeError as error:  # torch.OutOfMemoryError, or on a CPU its base class
            size = format_size((num_pages + num_padding_pages) * page_bytes)
            raise ParameterError("kv_cache_memory", f"{size} cannot be allocated; choose less") from error

    def _make_runner(self, model: Model, pool: KVPool, prepared: Prepared) -> Runner:
        bp = self.mesh.bp
        graphs = None
        if prepared.graph_plan is not None:
            world = self.mesh.world
            prepared.graph_plan.compiler.on_every_rank = lambda fact: bool(world.minimum(int(fact), "start"))
            graphs = build_executor(self.config, prepared.graph_plan, model, pool, prepared.num_token_ids, bp)
        return Runner(EagerExecutor(model, pool, prepared.ops, bp), graphs)

    def _choose_seed(self) -> int:
        """The configured seed, or else one that rank 0 draws for all ranks."""
        seed = secrets.randbits(SEED_BITS) if self.config.seed is None else self.config.seed
        return int(self.mesh.world.broadcast(torch.tensor([seed]), 0, "start"))

    def _report(self, model: Model, page_bytes: int) -> tuple[RankReport, ...]:
        """What every rank holds, by rank."""
        config = self.config
        graphs = self.runner.graph_stats()
        own = RankReport(
            host=platform.node(),
            device=str(model.ops.device),
            weights=_num_bytes(model),
            num_pages=self.limits.num_pages,
            page_bytes=page_bytes,
            num_graphs=graphs.num_buckets if graphs else 0,
            graphs=graphs.memory if graphs else 0,
            free=free_memory(config.device, config.world_size),
            linear=self._linear,
        )
        reports = self.mesh.all_gather_text("memory", msgspec.json.encode(own).decode())
        return tuple(msgspec.json.decode(text, type=RankReport) for text in reports)

    @property
    def dtype(self) -> str:
        """The dtype of weights, keys and values, e.g. "bfloat16"."""
        return str(self.runner.model.head.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        """The kind of device: "cpu" or "npu"."""
        return self.config.device

    # ---- requests --------------------------------------------------------------------------------------------------

    def add(self, request_id: str, prompt: List[int], params: DecodingParams, *, trace: bool = False) -> None:
        """Queues a request.

        Args:
            request_id: any text that no unfinished request has as its id.
            prompt: token ids.
            params: how the request is decoded.
            trace: whether the request's updates carry a record of each forward pass.

        Raises:
            ParameterError: the request could never run.
            ValueError: the id is in use.
        """
        ids_in_use = self.scheduler.running, self.scheduler.waiting, self._open_step or ()
        if any(request_id in ids for ids in ids_in_use):
            raise ValueError(f"request id {request_id!r} is in use")
        self.limits.check(len(prompt), params)
        if self.runner.graphs is not None:
            eos = self.model_config.eos_token_ids if params.eos_token_ids is None else params.eos_token_ids
            params = self.runner.graphs.with_fixed_branches(params, eos)
        if params.is_random and params.seed is None:
            params = replace(params, seed=self._seeds.getrandbits(SEED_BITS))
        self.scheduler.add(Request(request_id, tuple(prompt), params, trace))

    def abort(self, request_id: str) -> bool:
        """Ends a request now and frees its pages; it gets no further update. False if there is no such request."""
        interrupted = None if self._open_step is None else self._open_step.pop(request_id, None)
        try:
            sequence = self.scheduler.running.get(request_id)
            if sequence is not None:
                self.runner.release(sequence)
            return self.scheduler.remove(request_id) or interrupted is not None
        except BaseException:  # Ctrl-C, for example
            self._drop_running().pop(request_id, None)
            raise

    def has_work(self) -> bool:
        """Whether ``step`` has something to do: requests run or wait, or those of an interrupted step must be ended."""
        return bool(self.scheduler.running or self.scheduler.waiting or self._open_step)

    def step(self) -> list[Update]:
        """Admits what may run, makes one forward pass, and says what it did to every request that took part.

        If the step before was interrupted, such as by Ctrl-C, this one only ends the requests that ran in it.
        """
        if self._open_step is not None:
            return self._fail_open_step(INTERRUPTED)
        self._open_step = dict(self.scheduler.running)
        try:
            plan = self.scheduler.plan()
            self._open_step.update(self.scheduler.running)  # requests that finish in the step leave ``running``
            updates = [] if plan is None else self._run(plan)
        except BaseException:  # Ctrl-C, for example
            self._drop_running()
            raise
        self._open_step = None
        return updates

    def _drop_running(self) -> dict[str, Sequence]:
        """Takes out all running requests after an interruption, which may have come in the middle of any bookkeeping.

        Returns:
            The requests whose end the next step reports; it may be changed.
        """
        self._open_step = {**(self._open_step or {}), **self.scheduler.running}
        self.runner.reset()
        self.scheduler.reset()
        return self._open_step

    def _run(self, plan: StepPlan) -> list[Update]:
        """Makes a planned step. An engine of one rank survives a step without memory: only the requests in it end."""
        start = time.perf_counter()
        try:
            result = self.runner.step(plan, self.scheduler.running)
        except (RuntimeError, MemoryError) as error:
            if self.mesh.world.size > 1:
                self._raise_if_a_rank_failed(error)
            elif is_out_of_memory(error):
                return self._end_without_memory(plan)
            raise
        self._step_seconds = time.perf_counter() - start
        self._agreement.record_step(plan, result)
        return [self._update(sequence) for sequence in result.sequences]

    def _end_without_memory(self, plan: StepPlan) -> list[Update]:
        """Ends the requests of a step for which there was no memory."""
        # A graph of any request may be in flight; or a copy that the plan makes, of a cached page, may be missing.
        if self.runner.graphs is not None or plan.copies:
            return self._fail_open_step(NO_MEMORY)
        request_ids = [step.request_id for step in plan.sequences]
        for request_id in request_ids:
            self.abort(request_id)
        return [Update.without_step(request_id, "error", NO_MEMORY) for request_id in request_ids]

    def _raise_if_a_rank_failed(self, error: Exception) -> None:
        """Raises RankError in place of what a compiled step raises when an exchange in it fails because of another
        rank. Other exchanges raise RankError themselves."""
        if not isinstance(error, RankError):
            reason = self.mesh.world.explain()
            if reason is not None:
                raise RankError(f"a step failed: {reason}") from error

    def _fail_open_step(self, reason: str) -> list[Update]:
        """Ends the requests that ran when a step broke off, which may have updated them in part or lost updates."""
        ended = self._drop_running()  # once more, in case that was interrupted too
        updates = [Update.without_step(request_id, "error", reason) for request_id in ended]
        self._open_step = None
        return updates

    def stats(self) -> EngineStats:
        """Counters and sizes at this moment."""
        scheduler, runner, allocator = self.scheduler, self.runner, self.scheduler.allocator
        cached = scheduler.prefix_cache.num_evictable if scheduler.prefix_cache is not None else 0
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
            copied_positions=runner.pool.copied_positions,
            gathered_bytes=runner.ops.gathered_bytes,
            step_seconds=self._step_seconds,
            num_rows=runner.num_rows,
            idle_rows=runner.idle_rows,
            traffic=self.mesh.traffic(),
            graphs=runner.graph_stats(),
        )

    def close(self, failure: str | None = None) -> None:
        """Leaves the other ranks, after which the engine cannot be used any more. One rank alone has nothing to leave.

        Args:
            failure: why this rank cannot go on; the other ranks end because of it.
        """
        self.mesh.close(failure)

    # ---- updates ---------------------------------------------------------------------------------------------------

    def _update(self, result: SequenceResult) -> Update:
        """What a step did to one request. A request that is done, or has failed, leaves the engine."""
        sequence, record = self.scheduler.running[result.request_id], result.record
        if record is not None:
            sequence.model_tokens += record.model_tokens
            sequence.canvas_positions += record.canvas_positions(len(sequence.request.prompt))
        self.scheduler.advance(sequence, record)
        return make_update(sequence, result)


def _num_bytes(model: Model) -> int:
    """The memory of a model's weights. A head that is one of them, or a view of one, takes no memory of its own."""
    weights = list(model.weights.values())
    is_among_weights = _memory(model.head) in map(_memory, weights)
    return sum(weight.nbytes for weight in weights) + (0 if is_among_weights else model.head.nbytes)


def _memory(weight: Tensor) -> int:
    """Identifies the memory of a tensor: equal for tensors that share it. Packed weights have no address, so the object
    itself stands for theirs."""
    return id(weight) if weight.is_mkldnn else weight.untyped_storage().data_ptr()
