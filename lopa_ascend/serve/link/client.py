"""The engine as the HTTP process sees it: choices go in, and their progress comes out.

Everything here belongs to one event loop, and nothing blocks it. The engine knows token ids only; text is made here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Protocol

import msgspec

from lopa_ascend.config import ParameterError
from lopa_ascend.core import Request
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.engine.commands import Abort, StartProfile, StopProfile
from lopa_ascend.serve.config import ServeConfig
from lopa_ascend.serve.http.api_error import ApiError, unavailable
from lopa_ascend.serve.link.generation import Generation
from lopa_ascend.serve.link.messages import FromEngine, Left, Lost, Profiled, Ready, Stepped, ToEngine
from lopa_ascend.text.output_stream import OutputStream, output_stream
from lopa_ascend.text.prompt import Prompts
from lopa_ascend.text.tokenizer_files import load_tokenizer
from lopa_ascend.types import EngineStats, TokenRun, Update

logger = logging.getLogger("uvicorn.error")

Observer = Callable[[Stepped], None]
LAST_PROFILE_TIME = 60.0
"""Most seconds in which a profile must be written when the server ends."""
MAX_ATTEMPTS = 3
"""Engines that a choice may lose before it fails: it may be what ends them."""


class EngineLink(Protocol):
    """The way to one engine, or to several that share the choices."""

    def send(self, message: ToEngine) -> None:
        """Queues a message."""

    async def receive(self) -> FromEngine:
        """The next message."""

    async def wait(self) -> None:
        """Until the engine has ended."""

    @property
    def ending(self) -> str | None:
        """How the engine has ended; None while it runs."""

    def kill(self) -> None:
        """Ends the engine at once."""

    async def close(self) -> None:
        """Ends the engine and waits until it is gone."""


@dataclass
class _Unfinished:
    generation: Generation
    index: int
    """In its generation."""
    output: OutputStream
    last: Update | None = None
    """None while it waits."""
    is_shown: bool = False
    """The client has been sent some of it."""
    attempts: int = 1

    def aborted(self) -> Update:
        """Ends the choice with the finish reason "abort", without new tokens."""
        if self.last is None:
            return Update.without_step(self.generation.choices[self.index].request_id, "abort")
        return replace(self.last, tokens=TokenRun(), winner=None, record=None, finish_reason="abort")


class EngineClient:
    """The engine as the HTTP process sees it. Made by ``connect``, ended by ``close``. Threads may use ``prompts``."""

    def __init__(self, engine: EngineLink, ready: Ready, prompts: Prompts, config: ServeConfig):
        self.ready, self.prompts, self.config = ready, prompts, config
        self.stats = EngineStats(0, 0, 0, 0, ready.limits.num_pages)
        """Of several engines, the stats that came last."""
        self.engines: dict[str, EngineStats] = {}
        """By name of the engine."""
        self.lost: Counter[tuple[str, str]] = Counter()
        """Choices that lost their engine, by its name and by outcome: "retried" or "failed"."""
        self.observers: list[Observer] = []
        """Called after each step, and about once a second when idle."""
        self.engine_died = asyncio.Event()
        """Set if the engine ends without having been told to."""
        self._engine = engine
        self._choices: dict[str, _Unfinished] = {}
        """By the engine's request ids."""
        self.num_running = 0
        self._generations: dict[str, Generation] = {}
        self._profile_answers: asyncio.Queue[Profiled] = asyncio.Queue()
        self._profile_lock = asyncio.Lock()
        """Held until the engine has answered."""
        self._is_profiling = False
        """One was begun and not asked for since."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        """Timeouts, by request id."""
        self._idle = asyncio.Event()
        """Set while there is no generation."""
        self._idle.set()
        self._stopping = False
        self._death: str | None = None
        """How the engine has ended; None while it runs."""
        self._loop = asyncio.get_running_loop()
        self._last_message = self._loop.time()
        """Time of the engine's latest message."""
        self._watcher: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls, engine: EngineLink, ready: Ready, config: ServeConfig, chat_template: str | None
    ) -> EngineClient:
        """The client of an engine that has started; ``chat_template`` None: the model's own. Raises ValueError or
        OSError if the tokenizer cannot be read, and closes the engine."""
        try:
            client = cls(engine, ready, await asyncio.to_thread(_prompts, config, chat_template, ready), config)
        except BaseException:
            await engine.close()
            raise
        client._watcher = asyncio.create_task(client._watch_engine())
        return client

    # ---- state -----------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._choices) - self.num_running

    @property
    def capacity(self) -> int:
        """Choices that may run and wait together. A request with more could never be accepted."""
        return self._num_seqs + self.config.max_num_queued_reqs

    @property
    def _num_seqs(self) -> int:
        return self.ready.limits.max_num_seqs * max(1, len(self.engines))

    def health(self) -> str | None:
        """None while the engine makes progress, else why the server cannot serve."""
        if self._death is not None:
            return self._death
        if self._stopping:
            return "the server is shutting down"
        silence, limit = self._loop.time() - self._last_message, self.config.watchdog_timeout
        if silence > limit:
            return f"the engine has been silent for {silence:.0f} s (watchdog timeout: {limit:g} s)"
        return None

    # ---- requests --------------------------------------------------------------------------------------------------

    def submit(
        self, request_id: str, choices: Sequence[Request], *, trace: bool = False, streams: bool = False
    ) -> Generation:
        """Hands choices, which were checked against ``ready.limits``, to the engine; ``release`` must follow.

        With ``trace`` updates carry a record of each forward pass; ``streams``: the client is sent each update.

        Raises:
            ParameterError: there are more than ``capacity``, or ``request_id`` is in use.
            ApiError: 503, the server stops, the engine is dead or hangs, or ("queue_full") too many choices wait.
        """
        if request_id in self._generations:
            raise ParameterError("request_id", f"{request_id!r} is in use")
        if len(choices) > self.capacity:
            one_prompt = all(choice.prompt is choices[0].prompt for choice in choices)
            message = f"prompts times n make {len(choices)} choices; this server takes at most {self.capacity}"
            raise ParameterError("n" if one_prompt else "prompt", message)
        if (problem := self.health()) is not None:
            raise unavailable(problem, "service_unavailable" if self._death is None else "engine_dead")
        room = max(0, self._num_seqs - self.num_running) + self.config.max_num_queued_reqs
        if self.num_waiting + len(choices) > room:
            message = (
                f"the queue has room for {max(0, room - self.num_waiting)} choices; this request has {len(choices)}"
            )
            raise unavailable(message, "queue_full")
        generation = Generation(request_id, choices, trace, self._end, streams)
        self._begin(generation)
        return generation

    def _begin(self, generation: Generation) -> None:
        self._generations[generation.request_id] = generation
        self._idle.clear()
        for index, choice in enumerate(generation.choices):
            self._choices[choice.request_id] = _Unfinished(generation, index, self._output(choice))
            self._generate(choice)
        if (limit := self.config.request_timeout) is not None:
            late = ApiError(HTTPStatus.GATEWAY_TIMEOUT, f"the request took longer than {limit:g} s", code="timeout")
            self._timers[generation.request_id] = self._loop.call_later(limit, generation.fail, late)

    def _output(self, choice: Request) -> OutputStream:
        return output_stream(choice.prompt, choice.params, self.prompts.tokenizer, choice.gapped)

    def _generate(self, choice: Request) -> None:
        params = choice.params.with_valid(stop=())  # the engine knows no text
        self._engine.send(msgspec.structs.replace(choice, params=params))

    def release(self, generation: Generation) -> None:
        """Ends the generation if it still runs, and forgets it."""
        generation.ended = True
        self._end(generation)
        self._generations.pop(generation.request_id, None)
        if (timer := self._timers.pop(generation.request_id, None)) is not None:
            timer.cancel()
        if not self._generations:
            self._idle.set()

    def abort(self, request_id: str) -> bool:
        """Ends the unfinished choices of a request with the finish reason "abort". Returns whether it had any."""
        generation = self._generations.get(request_id)
        if generation is None:
            return False
        ended = self._end(generation)
        for choice in ended:
            update = choice.aborted()
            choice.output.push(update)
            generation.post(choice.index, update, choice.output.progress)
        return bool(ended)

    def _end(self, generation: Generation) -> list[_Unfinished]:
        """Takes the unfinished choices of a generation out of the engine."""
        choice_ids = [choice.request_id for choice in generation.choices]
        unfinished = [choice_id for choice_id in choice_ids if choice_id in self._choices]
        if self._death is None:
            for choice_id in unfinished:
                self._engine.send(Abort(choice_id))
        return [self._forget(choice_id) for choice_id in unfinished]

    def _forget(self, choice_id: str) -> _Unfinished:
        choice = self._choices.pop(choice_id)
        if choice.last is not None:
            self.num_running -= 1
        return choice

    # ---- the engine ------------------------------------------------------------------------------------------------

    async def _watch_engine(self) -> None:
        """Receives messages until the engine ends; then ends all requests with an error."""
        receive = asyncio.create_task(self._receive())
        death = asyncio.create_task(self._engine.wait())
        try:
            await asyncio.wait({receive, death}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            receive.cancel()
            death.cancel()
        if self._engine.ending is None:
            logger.error("a message from the engine could not be handled", exc_info=receive.exception())
            self._engine.kill()
            await self._engine.wait()
        self._death = f"the engine process has died ({self._engine.ending})"
        logger.error(self._death)
        for generation in list(self._generations.values()):
            generation.fail(unavailable(self._death, "engine_dead"))
        self.engine_died.set()

    async def _receive(self) -> None:
        while True:
            message = await self._engine.receive()
            self._last_message = self._loop.time()
            if isinstance(message, Lost):
                self._lose(message)
                continue
            if isinstance(message, Profiled):
                self._profile_answers.put_nowait(message)
                continue
            if isinstance(message, Left):
                self.engines.pop(message.engine, None)
                continue
            assert isinstance(message, Stepped), message
            self.stats = self.engines[message.engine] = message.stats
            for update in message.updates:
                self._deliver(update, message.engine)
            for observer in self.observers:
                observer(message)

    def _deliver(self, update: Update, engine: str) -> None:
        choice = self._choices.get(update.request_id)
        if choice is None:  # it was aborted while the update was on its way
            return
        if choice.last is None:
            self.num_running += 1
        choice.last = update
        choice.generation.engines[choice.index] = engine
        choice.is_shown |= choice.generation.streams and bool(update.tokens or choice.generation.trace)
        if update.finish_reason == "error":
            self._forget(update.request_id)
            message = f"generation failed: {update.error}"
            choice.generation.fail(ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="engine_error"))
            return
        if choice.output.push(update) is not None:
            self._forget(update.request_id)
            if update.finish_reason is None:  # a stop string ended it; the engine does not know stop strings
                self._engine.send(Abort(update.request_id))
        choice.generation.post(choice.index, update, choice.output.progress)

    def _lose(self, lost: Lost) -> None:
        """Begins a choice that lost its engine again, unless the client has been sent some of it."""
        choice = self._choices.get(lost.request_id)
        if choice is None:
            return
        is_over = choice.is_shown or choice.attempts == MAX_ATTEMPTS
        self.lost[lost.engine, "failed" if is_over else "retried"] += 1
        if is_over:
            self._forget(lost.request_id)
            choice.generation.fail(unavailable(lost.message, "engine_dead"))
            return
        if choice.last is not None:
            self.num_running -= 1
        asked = choice.generation.choices[choice.index]
        choice.output, choice.last = self._output(asked), None
        choice.attempts += 1
        self._generate(asked)

    # ---- profiles --------------------------------------------------------------------------------------------------

    async def start_profile(self, name: str, ranks: list[int], delay_steps: int, num_steps: int) -> Profiled:
        """Begins a profile; see ``StartProfile``. Raises ApiError, 503, if the engine is dead."""
        return await self._profile(StartProfile(name, ranks, delay_steps, num_steps))

    async def stop_profile(self) -> Profiled:
        """Waits until the profile is written. Raises as ``start_profile`` does."""
        return await self._profile(StopProfile())

    async def _profile(self, asked: StartProfile | StopProfile) -> Profiled:
        # The answer must be taken, even if nobody waits for it any more.
        return await asyncio.shield(asyncio.create_task(self._exchange(asked)))

    async def _exchange(self, asked: StartProfile | StopProfile) -> Profiled:
        async with self._profile_lock:
            if self._death is None:
                self._engine.send(asked)
            answer = asyncio.create_task(self._profile_answers.get())
            death = asyncio.create_task(self.engine_died.wait())
            await asyncio.wait({answer, death}, return_when=asyncio.FIRST_COMPLETED)
            death.cancel()
            if not answer.done():
                answer.cancel()
                raise unavailable(self._death or "the engine has ended", "engine_dead")
            if answer.result().refusal is None:
                self._is_profiling = isinstance(asked, StartProfile)
            return answer.result()

    # ---- the end ---------------------------------------------------------------------------------------------------

    async def drain(self, timeout: float) -> None:
        """Refuses new requests. Returns when running ones and a profile are done, or after ``timeout`` seconds."""
        self._stopping = True
        idle = asyncio.create_task(self._idle.wait())
        await asyncio.wait({idle}, timeout=timeout)
        idle.cancel()
        if self._is_profiling:
            with contextlib.suppress(ApiError, asyncio.TimeoutError):  # the engine is dead, or hangs
                await asyncio.wait_for(self.stop_profile(), LAST_PROFILE_TIME)

    def stop(self) -> None:
        """Refuses new requests, and answers all unfinished ones with a 503."""
        self._stopping = True
        for generation in list(self._generations.values()):
            generation.fail(unavailable("the server is shutting down"))

    def kill(self) -> None:
        self._engine.kill()

    async def close(self) -> None:
        """Returns when the processes of the engine, of grammars and of chat templates are gone."""
        self.stop()
        if self._watcher is not None:
            self._watcher.cancel()
        await self._engine.close()
        self.prompts.close()


def _prompts(config: ServeConfig, chat_template: str | None, ready: Ready) -> Prompts:
    limits = ready.limits
    tokenizer = load_tokenizer(config.engine.model or DEMO_MODEL, limits.vocab_size, chat_template)
    if chat_template is not None and tokenizer is None:
        raise ParameterError("chat_template", f"{ready.model_name} has no tokenizer files")
    return Prompts(
        tokenizer,
        limits.vocab_size,
        limits.mask_token_id,
        ready.model_name,
        limits.max_model_len,
        split_special_tokens=config.split_special_tokens,
        template_variables=config.default_chat_template_kwargs,
    )
