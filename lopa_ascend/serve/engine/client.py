"""The HTTP process's side of the engine: choices in, what became final out.

Everything here belongs to one event loop and none of it blocks. Text is made here, not in the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus

from lopa_ascend.config import EngineConfig, ParameterError
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.engine.commands import Abort, Generate
from lopa_ascend.serve.api.errors import ApiError, unavailable
from lopa_ascend.serve.engine.generation import Choice, Generation
from lopa_ascend.serve.engine.messages import Ready, Stepped
from lopa_ascend.serve.engine.process import EngineFailed, EngineProcess
from lopa_ascend.text.output import OutputStream
from lopa_ascend.text.prompt import Prompts
from lopa_ascend.text.tokenizer_files import load_tokenizer
from lopa_ascend.types import EngineStats, Update

__all__ = ["Choice", "ClientSettings", "EngineClient", "EngineFailed", "Generation"]

logger = logging.getLogger("uvicorn.error")

Observer = Callable[[Sequence[Update], EngineStats], None]


@dataclass(frozen=True)
class ClientSettings:
    """``chat_template`` is the template's text, for prompts; None for the model's own. Times are in seconds."""

    max_num_queued_reqs: int = 1024
    request_timeout: float | None = None
    watchdog_timeout: float = 60.0
    chat_template: str | None = None


@dataclass
class _Running:
    """One choice as the engine knows it. ``last`` is None while it waits."""

    generation: Generation
    index: int
    output: OutputStream
    last: Update | None = None


class EngineClient:
    """The engine process, seen from the HTTP process. ``start`` makes one; ``close`` must follow.

    Attributes:
        ready: what the engine said of itself.
        prompts: text and conversations -> token ids. May be used in threads.
        stats: the engine's latest.
        observers: called with each message's updates and stats, about once a second while the engine is idle.
        died: set once the engine is dead without having been told to end.
    """

    def __init__(self, engine: EngineProcess, ready: Ready, prompts: Prompts, settings: ClientSettings):
        self.ready, self.prompts, self.settings = ready, prompts, settings
        self.stats = EngineStats(0, 0, 0, 0, ready.limits.num_pages)
        self.observers: list[Observer] = []
        self.died = asyncio.Event()
        self._engine = engine
        self._choices: dict[str, _Running] = {}
        self._num_running = 0
        self._generations: dict[str, Generation] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False
        self._death: str | None = None
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()
        self._watch = self._loop.create_task(self._watch_engine())

    @classmethod
    async def start(cls, config: EngineConfig, settings: ClientSettings) -> EngineClient:
        """Starts the engine process and waits until its model is loaded.

        Raises:
            EngineFailed: it cannot serve this model, or ended while it loaded.
            ValueError, OSError: the tokenizer cannot be read, or no process can be started.
        """
        engine, ready = await EngineProcess.start(config)
        try:
            return cls(engine, ready, await asyncio.to_thread(_prompts, config, settings, ready), settings)
        except BaseException:
            await engine.close()
            raise

    # ---- state -----------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Choices that the engine has begun."""
        return self._num_running

    @property
    def num_waiting(self) -> int:
        return len(self._choices) - self._num_running

    @property
    def max_choices(self) -> int:
        """More than so many choices in one request could never be admitted."""
        return self.ready.limits.max_num_seqs + self.settings.max_num_queued_reqs

    def health(self) -> str | None:
        """None while the engine makes progress, else why it does not serve."""
        if self._death is not None:
            return self._death
        if self._stopping:
            return "the server is shutting down"
        silence, limit = self._loop.time() - self._heard, self.settings.watchdog_timeout
        if silence > limit:
            return f"the engine has not answered for {silence:.0f} s (watchdog timeout: {limit:g} s)"
        return None

    # ---- requests --------------------------------------------------------------------------------------------------

    def submit(self, request_id: str, choices: Sequence[Choice], *, trace: bool = False) -> Generation:
        """Hands the choices to the engine; ``release`` must follow. They were checked against ``ready.limits``.

        Raises:
            ParameterError: there are more than ``max_choices``, or ``request_id`` is in use.
            ApiError: 503, the server stops, the engine is dead or hangs, or ("queue_full") too many choices wait.
        """
        if request_id in self._generations:
            raise ParameterError("request_id", f"{request_id!r} is in use")
        if len(choices) > self.max_choices:
            one_prompt = all(choice.prompt_token_ids is choices[0].prompt_token_ids for choice in choices)
            message = f"prompts times n make {len(choices)} choices; this server takes at most {self.max_choices}"
            raise ParameterError("n" if one_prompt else "prompt", message)
        if (trouble := self.health()) is not None:
            raise unavailable(trouble) if self._death is None else unavailable(trouble, "engine_dead")
        room = max(0, self.ready.limits.max_num_seqs - self.num_running) + self.settings.max_num_queued_reqs
        if self.num_waiting + len(choices) > room:
            message = f"{self.num_waiting} choices wait already, and this request has {len(choices)}"
            raise unavailable(message, "queue_full")
        generation = Generation(request_id, choices, trace, self._end)
        self._begin(generation)
        return generation

    def _begin(self, generation: Generation) -> None:
        self._generations[generation.request_id] = generation
        self._idle.clear()
        for index, name in enumerate(generation.choice_ids):
            choice = generation.choices[index]
            output = OutputStream(choice.prompt_token_ids, choice.params, self.prompts.tokenizer)
            self._choices[name] = _Running(generation, index, output)
            self._engine.send(Generate(name, choice.prompt_token_ids, choice.params, generation.trace))
        if (limit := self.settings.request_timeout) is not None:
            late = ApiError(HTTPStatus.GATEWAY_TIMEOUT, f"the request took longer than {limit:g} s", code="timeout")
            self._timers[generation.request_id] = self._loop.call_later(limit, generation.abort, late)

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
        """Ends a request's choices, whose output then says "abort"; False if it has none that still runs."""
        generation = self._generations.get(request_id)
        if generation is None:
            return False
        ended = self._end(generation)
        for choice in ended:
            last = choice.last or Update(generation.choice_ids[choice.index], (), (), 0, 0, 0, None, 0)
            update = replace(last, token_ids=(), max_probs=(), finish_reason="abort", winner=None, record=None)
            progress = choice.output.push(update)
            assert progress.output is not None
            output = replace(progress.output, finish_reason="abort", stop_reason=None)
            generation.post(choice.index, update, replace(progress, output=output))
        return bool(ended)

    def _end(self, generation: Generation) -> list[_Running]:
        """Takes the generation's choices out of the engine; returns those that still ran."""
        names = [name for name in generation.choice_ids if name in self._choices]
        for name in names:
            self._tell_abort(name)
        return [self._forget(name) for name in names]

    def _tell_abort(self, name: str) -> None:
        if self._death is None:
            self._engine.send(Abort(name))

    def _forget(self, name: str) -> _Running:
        choice = self._choices.pop(name)
        self._num_running -= choice.last is not None
        return choice

    # ---- the engine ------------------------------------------------------------------------------------------------

    async def _watch_engine(self) -> None:
        receive = asyncio.create_task(self._receive())
        death = asyncio.create_task(self._engine.wait())
        try:
            await asyncio.wait({receive, death}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            receive.cancel()
            death.cancel()
        if self._engine.ending is None:
            logger.error("the engine's messages cannot be used", exc_info=receive.exception())
            self._engine.kill()
            await self._engine.wait()
        self._death = f"the engine process has died ({self._engine.ending})"
        logger.error(self._death)
        for generation in list(self._generations.values()):
            generation.abort(unavailable(self._death, "engine_dead"))
        self.died.set()

    async def _receive(self) -> None:
        while True:
            message = await self._engine.receive()
            assert isinstance(message, Stepped), message
            self._heard = self._loop.time()
            self.stats = message.stats
            for update in message.updates:
                self._deliver(update)
            for observer in self.observers:
                observer(message.updates, message.stats)

    def _deliver(self, update: Update) -> None:
        choice = self._choices.get(update.request_id)
        if choice is None:  # it was aborted meanwhile
            return
        self._num_running += choice.last is None
        choice.last = update
        if update.finish_reason == "error":
            self._forget(update.request_id)
            message = f"generation failed: {update.error}"
            choice.generation.abort(ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="engine_error"))
            return
        progress = choice.output.push(update)
        if progress.output is not None:
            self._forget(update.request_id)
            if update.finish_reason is None:  # a stop string, of which the engine knows nothing
                self._tell_abort(update.request_id)
        choice.generation.post(choice.index, update, progress)

    # ---- the end ---------------------------------------------------------------------------------------------------

    async def drain(self, timeout: float) -> None:
        """Takes no more work, and returns when all requests are answered or ``timeout`` seconds have passed."""
        self._stopping = True
        idle = asyncio.create_task(self._idle.wait())
        await asyncio.wait({idle}, timeout=timeout)
        idle.cancel()

    def stop(self) -> None:
        """Takes no more work; whoever still waits gets a 503."""
        self._stopping = True
        for generation in list(self._generations.values()):
            generation.abort(unavailable("the server is shutting down"))

    def kill(self) -> None:
        """Ends the engine process at once."""
        self._engine.kill()

    async def close(self) -> None:
        """Ends everything, and returns when the engine process is gone."""
        self.stop()
        self._watch.cancel()
        await self._engine.close()


def _prompts(config: EngineConfig, settings: ClientSettings, ready: Ready) -> Prompts:
    limits = ready.limits
    tokenizer = load_tokenizer(config.model or DEMO_MODEL, limits.vocab_size, settings.chat_template)
    if settings.chat_template is not None and tokenizer is None:
        raise ParameterError("chat_template", f"{ready.model_name} has no tokenizer files")
    return Prompts(tokenizer, limits.vocab_size, limits.mask_token_id, ready.model_name)
