"""The engine: requests of token ids in, updates out, many requests in one step. It knows no text."""

from __future__ import annotations

import atexit
import platform
import random
import secrets
import subprocess
import time
import zlib
from collections.abc import Sequence as List
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from lopa_ascend.backend import find_device
from lopa_ascend.backend.memory import is_out_of_memory
from lopa_ascend.config import EngineConfig, ParameterError
from lopa_ascend.config.kinds import format_size
from lopa_ascend.core import Request, Result, Sequence, Step
from lopa_ascend.engine.answers import Answer
from lopa_ascend.engine.commands import Abort, Admit, StartProfile, StopProfile
from lopa_ascend.engine.leader import Leader, Order, end_processes
from lopa_ascend.engine.prepare import Prepared, choose_num_pages, prepare, request_limits
from lopa_ascend.engine.profile import Profiles, RankTraces
from lopa_ascend.engine.scheduler import Scheduler
from lopa_ascend.engine.starter import Starter
from lopa_ascend.engine.turns import Pieces
from lopa_ascend.graph.setup import build_executor, build_forwards
from lopa_ascend.hub import model_name
from lopa_ascend.kv.pool import KVPool
from lopa_ascend.kv.prefix_cache import BlockPrefixCache, PrefixCache
from lopa_ascend.model.base import Model, settle
from lopa_ascend.parallel.coded import ExchangeError, wrong_exchange
from lopa_ascend.parallel.collectives import RankError
from lopa_ascend.parallel.mesh import Mesh
from lopa_ascend.runner.eager import EagerExecutor
from lopa_ascend.runner.runner import Runner
from lopa_ascend.types import (
    Alternatives,
    EngineStats,
    RankReport,
    StepRecord,
    TokenRun,
    Update,
    winner_rank,
)

SEED_BITS = 53
"""Bits of a drawn seed: few enough for every JSON client to send it back unchanged."""
NO_MEMORY = "there was no memory for a step; requests with fewer branches or tokens need less"
BROKEN_OFF = "a step broke off, so the state of its requests is not known; start a new engine"
"""Why an engine ends after an error in a step, or an exception raised there by a signal handler."""
COMPILE_WAIT = 0.02
"""Seconds that a step of an idle engine waits for a grammar."""
AGREEMENT_INTERVAL = 64
"""Steps between two comparisons of the ranks' decisions."""


class Engine:
    """A model, its KV pool and the requests that run on it. Deterministic: equal calls in equal order give equal
    updates.

    Attributes:
        answers: what this model must answer before it serves.
        model_name: the name of the model's directory, or "demo".
        kv_cache_memory: bytes of the KV pool on this rank.
        ranks: every rank's report, by rank.
        seed: configured or drawn; the same on every rank.

    Raises:
        CheckpointError, ConfigError, ModelError, TokenizerError, UnsupportedStackError: the model or the device's
            software cannot be used. No weights were loaded, unless their values are wrong, such as NaN.
        ParameterError: a setting cannot be used. No weights were loaded, unless it is ``kv_cache_memory`` or
            ``gpu_memory_utilization``.
        StartError: another rank cannot serve.
        GraphError: there is no room for so many graphs. The device may show that only once the weights are loaded.
    """

    follows = False
    """Whether rank 0 decides when a request with a grammar may run."""

    def __init__(self, config: EngineConfig, mesh: Mesh | None = None) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.config, self.mesh = config, mesh or Mesh()
        self.model_name = model_name(config)
        prepared = self._prepare()
        self.answers = self._share(prepared.answers)
        model = prepared.model_source.load(prepared.ops, self.mesh.tp, prepared.max_model_len)
        self.model_config = replace(model.config, eos_token_ids=prepared.eos_token_ids)
        self._linear = settle(model)
        pool, page_bytes = self._make_pool(model, prepared)
        self.kv_cache_memory = pool.num_pages * page_bytes
        self.limits = request_limits(config, prepared, self.model_config, pool.num_pages)
        self._check_exchanges(model, prepared)
        self.runner = self._make_runner(model, pool, prepared)
        self._profiles = Profiles(config, self.mesh, self.runner)
        cache = BlockPrefixCache if model.properties.has_blocks else PrefixCache
        prefix_cache = cache(pool.allocator) if config.enable_prefix_caching else None
        self._compiling: dict[str, Request] = {}
        """By request id, in order of arrival: requests whose grammars are being compiled."""
        self._starter = Starter(self.runner, self.model_config, prepared.tokenizer, prepared.num_token_ids)
        # Not a method of the engine: the scheduler must not refer to it, so that an engine that is not used any more
        # frees its pages at once.
        pieces = None
        if model.properties.is_causal:
            free_tokens, reach = find_device(config.device).free_tokens, self.model_config.attention_reach
            pieces = Pieces(self.limits.max_num_batched_tokens, free_tokens, reach)
        self.scheduler = Scheduler(self.limits, pool.allocator, self._starter.begin, prefix_cache, pieces)
        self._step_seconds = 0.0
        self._failure: str | None = None
        self._leader: Leader | None = None
        self._digests = {"who takes part": 0, "the page tables": 0, "what was decided": 0}
        """Of everything planned and decided since the start; equal on all ranks."""
        # Without the settings that may differ between machines.
        shared = replace(
            config, model=None, lora=None, threads=None, graph_cache=None, profile_dir=None, check_answers=None
        )
        captured = prepared.graph_plan and prepared.graph_plan.compiler.captured
        facts = {"its model": self.model_config, "its limits": self.limits, "the order of its graphs": captured}
        self.mesh.check_agreement(0, {"its configuration": shared, **facts})
        self.seed = self._choose_seed()
        self._seeds = random.Random(self.seed)
        self.ranks = self._report(model, page_bytes)
        self.mesh.start()

    # ---- construction ----------------------------------------------------------------------------------------------

    def _prepare(self) -> Prepared:
        prepared, refusal = None, None
        try:
            prepared = prepare(self.config, self.mesh)
        except (ValueError, OSError) as error:
            refusal = error
        self.mesh.raise_together(refusal)
        assert prepared is not None
        layouts = self.mesh.all_gather_text("attention layout", prepared.attention_layout)
        if others := [rank for rank, layout in enumerate(layouts) if layout != self.config.attention_layout]:
            if len(others) < self.mesh.size:
                dies = ", ".join(map(self.mesh.describe_rank, others))
                message = f"{self.config.attention_layout} is wrong on {dies} alone, so these dies may be broken"
                advice = f"see their warnings and leave them out, or choose {layouts[others[0]]} for all ranks"
                raise ParameterError("attention_layout", f"{message}; {advice}")
        return prepared

    def _share(self, answers: tuple[Answer, ...]) -> tuple[Answer, ...]:
        """Rank 0's answers; no other rank has read them."""
        if self.config.check_answers is None:
            return ()
        texts = self.mesh.all_gather_text("answers", msgspec.json.encode(answers).decode())
        return msgspec.json.decode(texts[0], type=tuple[Answer, ...])

    def _make_pool(self, model: Model, prepared: Prepared) -> tuple[KVPool, int]:
        """The KV pool, with as many pages on every rank, and the bytes of a page. ParameterError if memory is too
        small."""
        shape, dtype = model.config.kv_shape(model.tp.size), model.head.dtype
        page_bytes = KVPool.page_bytes(shape, dtype)
        own_pages = choose_num_pages(self.config, prepared, model, page_bytes)
        num_pages = self.mesh.world.minimum(own_pages, "start")
        num_padding_pages = prepared.graph_plan.num_padding_pages if prepared.graph_plan else 0
        try:
            return KVPool(shape, num_pages, dtype, str(model.ops.device), num_padding_pages), page_bytes
        except RuntimeError as error:  # torch.OutOfMemoryError, or on a CPU its base class
            size = format_size((num_pages + num_padding_pages) * page_bytes)
            param = "kv_cache_memory" if self.config.gpu_memory_utilization is None else "gpu_memory_utilization"
            raise ParameterError(param, f"{size} of KV pages cannot be allocated; choose less") from error

    def _check_exchanges(self, model: Model, prepared: Prepared) -> None:
        """Tests the exchanges of all groups, alone and in a captured graph, at the smallest and the largest step's
        size. If one is wrong, all ranks raise."""
        plan, width = prepared.graph_plan, model.config.hidden_size
        declared = [bucket.tokens for bucket in plan.declared] if plan else []
        sizes = sorted({min(declared, default=1), max(declared, default=prepared.max_num_batched_tokens)})
        replayed = plan.compiler.replayed if plan else None
        groups = (("tensor parallel", self.mesh.tp), ("branch parallel", self.mesh.bp))
        found = [
            wrong_exchange(group, name, size, model.head, width, replayed) for name, group in groups for size in sizes
        ]
        fault = next(filter(None, found), None)
        self.mesh.raise_together(None if fault is None else ExchangeError(fault))

    def _make_runner(self, model: Model, pool: KVPool, prepared: Prepared) -> Runner:
        bp, plan = self.mesh.bp, prepared.graph_plan
        graphs = forwards = None
        if plan is not None:
            world = self.mesh.world
            plan.compiler.on_every_rank = lambda fact: bool(world.minimum(int(fact), "start"))
            plan.compiler.while_waiting = world.while_waiting
            self.mesh.before_end = plan.compiler.close
            if plan.forwards:
                forwards = build_forwards(plan, model, pool, prepared.num_token_ids, bp)
            else:
                graphs = build_executor(self.config, plan, model, pool, prepared.num_token_ids, bp)
        return Runner(EagerExecutor(model, pool, prepared.ops, bp, forwards), self.limits, graphs)

    def _choose_seed(self) -> int:
        """The configured seed, or one that rank 0 draws for all ranks."""
        seed = secrets.randbits(SEED_BITS) if self.config.seed is None else self.config.seed
        return int(self.mesh.world.broadcast(torch.tensor([seed]), 0, "start"))

    def _report(self, model: Model, page_bytes: int) -> tuple[RankReport, ...]:
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
            free=find_device(config.device).free_memory(config.world_size),
            linear=self._linear,
            versions=find_device(config.device).versions(),
        )
        reports = self.mesh.all_gather_text("memory", msgspec.json.encode(own).decode())
        return tuple(msgspec.json.decode(text, type=RankReport) for text in reports)

    @property
    def dtype(self) -> str:
        """Dtype of weights, keys and values, e.g. "bfloat16"."""
        return str(self.runner.model.head.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        return self.config.device

    # ---- requests --------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ParameterError: the request could never run.
            ValueError: the id is in use.
            RuntimeError: the engine has ended.
        """
        name, length, params = request.request_id, len(request.prompt), request.params
        with self._call():
            self._check()
            if any(name in known for known in (self.scheduler.running, self.scheduler.waiting, self._compiling)):
                raise ValueError(f"request id {name!r} is in use")
            self.limits.check(length, params)
            if request.continuations:
                self.limits.check_continuations(length, params, request.continuations)
            if request.gapped is not None:
                self.limits.check_gaps(params, request.gapped)
            grammar = params.structured_outputs
            is_compiled = grammar is not None and not grammar.is_any
            if grammar is not None and is_compiled:
                if (compiler := self._starter.compiler) is None:
                    raise ParameterError("structured_outputs", f"needs a tokenizer, and {self.model_name} has none")
                self._starter.grammars[name] = compiler.compile(grammar)
            if self.runner.graphs is not None:
                eos = params.eos_ids_or(self.model_config.eos_token_ids)
                params = self.runner.graphs.with_fixed_branches(params, eos)
            if params.is_random and params.seed is None:
                params = replace(params, seed=self._seeds.getrandbits(SEED_BITS))
            properties = self.runner.model.properties
            request = msgspec.structs.replace(request, params=params, properties=properties)
            if is_compiled:
                self._compiling[name] = request
            else:
                self.scheduler.add(request)
            if self._leader is not None:
                self._leader.outbox.append(request)

    def admit(self, request_id: str) -> None:
        self.scheduler.add(self._compiling.pop(request_id))
        if self._leader is not None:
            self._leader.outbox.append(Admit(request_id))

    def abort(self, request_id: str) -> bool:
        """Ends a request now and frees its pages, without a further update. False if there is no such request."""
        with self._call():
            sequence = self.scheduler.running.get(request_id)
            if sequence is not None:
                self.runner.release(sequence)
            self._starter.grammars.pop(request_id, None)
            found = self._compiling.pop(request_id, None) is not None or self.scheduler.remove(request_id)
            if found and self._leader is not None:
                self._leader.outbox.append(Abort(request_id))
        return found

    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting or self._compiling)

    def step(self) -> list[Update]:
        """Admits what may run, makes one forward pass, and returns an update for every request in it. RankError if the
        ranks cannot go on; RuntimeError if an error in an earlier step has ended the engine."""
        with self._call():
            self._check()
            updates = self._take_up()
            self._failure = BROKEN_OFF  # stands until the step is complete
            try:
                if self._leader is not None:
                    self._leader.send(Order.STEP)
                updates += self._make_step()
            except RankError as error:
                self._failure = str(error)
                raise
            self._failure = None
            self._profiles.step()
        return updates

    def _take_up(self) -> list[Update]:
        """Admits requests whose grammars are compiled, and ends those whose grammars failed to compile."""
        ended: list[Update] = []
        if self.follows:
            return ended
        is_idle = not (self.scheduler.running or self.scheduler.waiting)
        for request_id in list(self._compiling):
            grammar = self._starter.grammars[request_id]
            if self.mesh.size > 1 and self._leader is None:
                grammar.wait()  # so that the ranks, which make the same calls, admit it in the same step
            elif is_idle:
                grammar.wait(COMPILE_WAIT)
                is_idle = False
            if not grammar.is_done:
                continue
            if (error := grammar.error) is None:
                self.admit(request_id)
            else:
                self.abort(request_id)
                ended.append(Update.without_step(request_id, "error", error))
        return ended

    def _make_step(self) -> list[Update]:
        step = self.scheduler.plan()
        return [] if step is None else self._run(step)

    def start_profile(self, asked: StartProfile) -> None:
        """Records steps from the next one on. ProfileError if a profile runs, or there is no ``profile_dir``."""
        with self._call():
            self._check()
            self._profiles.start(asked)
            if self._leader is not None:
                self._leader.outbox.append(asked)

    def stop_profile(self) -> list[RankTraces]:
        """Ends the latest profile; returns what each rank has written. ProfileError if none was started since the last
        call; RankError if the ranks cannot go on."""
        with self._call():
            self._check()
            self._profiles.check_stop()
            if self._leader is not None:
                self._leader.outbox.append(StopProfile())
                self._leader.send(Order.WAIT)
            return self._profiles.stop()

    def lead(self, followers: List[subprocess.Popen[bytes]] = ()) -> None:
        """Makes this engine tell the others what it is asked. ``followers`` are the processes of other ranks that
        ``close`` must end; empty if another process started them."""
        self._leader = Leader(self.mesh.world, lambda: self.failure, followers)
        atexit.register(self.close)  # the others must not take the end of a script for a failure

    @property
    def failure(self) -> str | None:
        if self._leader is None:
            return self._failure
        return self.mesh.failure or self._failure or self._leader.failure

    def _call(self) -> AbstractContextManager[object]:
        """Suspends heartbeats during the call."""
        return nullcontext() if self._leader is None else self._leader.lock

    def _check(self) -> None:
        """Raises RankError or RuntimeError if the engine has ended."""
        if self.failure is not None:
            kind = RuntimeError if self._leader is None else RankError
            raise kind(f"this engine has ended: {self.failure}")

    def _run(self, step: Step) -> list[Update]:
        """Makes a planned step. An engine of one rank survives a lack of memory: only that step's requests end."""
        start = time.perf_counter()
        try:
            results = self.runner.step(step, self.scheduler.running.values())
        except (RuntimeError, MemoryError) as error:
            if self.mesh.world.size > 1:
                self._raise_if_a_rank_failed(error)
            elif is_out_of_memory(error):
                return self._end_without_memory(step)
            raise
        self._step_seconds = time.perf_counter() - start
        if self.mesh.size > 1:
            self._compare_decisions(step, results)
        return [self._update(sequence, record) for sequence, record in results]

    def _end_without_memory(self, step: Step) -> list[Update]:
        request_ids = [sequence.request_id for sequence in step.sequences]
        if step.copies and self.scheduler.prefix_cache is not None:
            self.scheduler.prefix_cache.clear()  # a copy of a page, to the cache or from it, may be missing
        if step.copies or self.runner.graphs is not None:  # the result of a graph that ran ahead may be lost
            request_ids = list(self.scheduler.running)
        for request_id in request_ids:
            self.abort(request_id)
        return [Update.without_step(request_id, "error", NO_MEMORY) for request_id in request_ids]

    def _raise_if_a_rank_failed(self, error: Exception) -> None:
        """Raises RankError for the error of a compiled step if another rank caused it. Exchanges outside compiled steps
        raise RankError themselves."""
        if not isinstance(error, RankError):
            closed = None if self._leader is None else self._leader.failure
            reason = closed or self.mesh.world.explain()
            if reason is not None:
                raise RankError(f"a step failed: {reason}") from error

    def _compare_decisions(self, step: Step, results: List[Result]) -> None:
        """Adds a step to the digests; at intervals compares them between ranks, with a RankError that names rank and
        difference."""
        added = {
            "who takes part": [sequence.request_id for sequence in step.sequences],
            "the page tables": [sequence.page_tables.by_slot for sequence in step.sequences],
            "what was decided": [_decisions(*result) for result in results],
        }
        for name, new in added.items():
            self._digests[name] = zlib.crc32(repr(new).encode(), self._digests[name])
        num_steps = step.index + 1
        if num_steps % AGREEMENT_INTERVAL == 0:
            self.mesh.check_agreement(num_steps, self._digests)

    def stats(self) -> EngineStats:
        scheduler, runner, allocator = self.scheduler, self.runner, self.scheduler.allocator
        cached = allocator.num_evictable
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(self._compiling),
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
        """Leaves the other ranks, which rank 0 ends; the engine cannot be used afterwards. An engine of one rank has
        nothing to leave. ``failure``: why this rank cannot go on; the other ranks end with it."""
        followers: List[subprocess.Popen[bytes]] = ()
        if self._leader is not None:
            if self._leader.has_ended:
                return
            atexit.unregister(self.close)
            self._leader.end()
            followers = self._leader.followers
        self.mesh.close(failure)
        end_processes(followers)

    # ---- updates ---------------------------------------------------------------------------------------------------

    def _update(self, sequence: Sequence, record: StepRecord | None) -> Update:
        """A step's effect on one request. A request that is done or has failed leaves the engine."""
        if record is not None:
            sequence.model_tokens += record.model_tokens
            sequence.canvas_positions += record.canvas_positions(len(sequence.request.prompt))
        self.scheduler.advance(sequence, record)
        strategy, params = sequence.strategy, sequence.request.params
        places, end, gap_ends = strategy.final()
        new = places[sequence.num_reported :]
        sequence.num_reported = len(places)
        answer = strategy.answer
        finish_reason, stop_token_id = None, None
        if sequence.error is not None:
            finish_reason = "error"
        elif sequence.plan is None:
            stop_token_id = end
            finish_reason = "length" if stop_token_id is None else "stop"
        return Update(
            request_id=sequence.request_id,
            tokens=TokenRun(
                tuple([answer.tokens[place] for place in new]),
                tuple([answer.probs[place] for place in new]),
                _alternatives(sequence, new),
            ),
            num_forwards=strategy.num_forwards,
            num_positions=strategy.num_opened,
            model_tokens=sequence.model_tokens,
            winner=None if record is None else winner_rank(record),
            cached_tokens=sequence.num_cached,
            finish_reason=finish_reason,
            stop_token_id=stop_token_id,
            error=sequence.error,
            seed=params.seed if params.is_random else None,
            record=record if sequence.request.trace else None,
            num_drafted=0 if record is None or record.accepted is None else len(record.drafted),
            num_accepted=0 if record is None else record.accepted or 0,
            second_was_right=record is not None and record.second_was_right,
            canvas_positions=sequence.canvas_positions,
            continuation_logprobs=sequence.continuation_logprobs,
            gap_ends=gap_ends,
        )


def _alternatives(sequence: Sequence, places: List[int]) -> tuple[Alternatives, ...]:
    """Most probable tokens at some places of the answer, if the request asked for them."""
    if not sequence.request.params.top_logprobs:
        return ()
    first = len(sequence.request.prompt)
    return tuple(sequence.strategy.alternatives.get(first + place, ()) for place in places)


def _decisions(sequence: Sequence, record: StepRecord | None) -> object:
    """What a step decided for a sequence and all ranks must agree on."""
    if record is None:
        return sequence.error
    # Not the probabilities: between machines of different kinds their last bits may differ without effect.
    fills = [(fill.position, fill.token) for fill in (*record.fills, *record.edits)]
    return record.winner, record.span, record.committed, fills


# ---- memory ----------------------------------------------------------------------------------------------------------


def _num_bytes(model: Model) -> int:
    """Memory of a model's weights. A head that shares memory with one of them counts once."""
    weights = list(model.weights.values())
    is_among_weights = _memory(model.head) in map(_memory, weights)
    return sum(weight.nbytes for weight in weights) + (0 if is_among_weights else model.head.nbytes)


def _memory(weight: Tensor) -> int:
    """Identifies a tensor's memory. Packed weights have no address, so the object stands for it."""
    return id(weight) if weight.is_mkldnn else weight.untyped_storage().data_ptr()
