"""The thread that owns the engine. Requests wait their turn in the order of their arrival, one choice at a time.

The event loop submits jobs and receives what is final after each forward pass; it never waits for the engine itself.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from http import HTTPStatus

from lopa_ascend.config import DecodingParams
from lopa_ascend.engine import LLM
from lopa_ascend.serve.errors import ApiError, unavailable
from lopa_ascend.types import Progress

logger = logging.getLogger("uvicorn.error")


@dataclass(frozen=True)
class Choice:
    """One generation of an HTTP request; a request has one for each of its prompts times ``n``."""

    prompt_token_ids: list[int]
    params: DecodingParams


class Generation:
    """The choices of one HTTP request under way. Belongs to the event loop; only ``_post`` is called elsewhere."""

    def __init__(self, choices: Sequence[Choice]):
        self.choices = choices
        self.ended = False
        """Set by the event loop; the worker looks at it after each forward pass."""
        self._events: asyncio.Queue[tuple[int, Progress] | Exception] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def _post(self, event: tuple[int, Progress] | Exception) -> None:
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def abort(self, error: Exception) -> None:
        """Ends it within one forward pass; whoever reads its progress gets ``error`` at once."""
        if not self.ended:
            self.ended = True
            self._events.put_nowait(error)

    async def progress(self) -> AsyncIterator[tuple[int, Progress]]:
        """Yields (index of the choice, what of it is final now) until every choice has its output.

        Raises:
            ApiError: the engine failed (500), or the server stops (503).
            ClientDisconnect: the client went away.
        """
        running = len(self.choices)
        while running:
            event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            yield event
            running -= event[1].output is not None


class Worker:
    """Runs generations in a thread of its own. Its public methods belong to the event loop."""

    def __init__(self, llm: LLM):
        self._llm = llm
        self._waiting: queue.SimpleQueue[tuple[Generation, int] | None] = queue.SimpleQueue()
        self._active: set[Generation] = set()
        self._stopping = False
        # A daemon, for a forward pass cannot be interrupted and must not hold the process up.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, choices: Sequence[Choice]) -> Generation:
        """Queues the choices; ``release`` must follow.

        Raises:
            ApiError: 503, the server stops or the thread is dead.
        """
        if self._stopping or not self.alive:
            raise unavailable("the server is shutting down" if self._stopping else "the engine thread is dead")
        generation = Generation(choices)
        self._active.add(generation)
        for index in range(len(choices)):
            self._waiting.put((generation, index))
        return generation

    def release(self, generation: Generation) -> None:
        """Ends the generation if it still runs, and forgets it."""
        generation.ended = True
        self._active.discard(generation)

    def stop(self) -> None:
        """Takes no more work; whoever still waits gets a 503."""
        self._stopping = True
        self._waiting.put(None)
        for generation in self._active:
            generation.abort(unavailable("the server is shutting down"))

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            generation, index = item
            if not generation.ended:
                self._run_choice(generation, index)

    def _run_choice(self, generation: Generation, index: int) -> None:
        choice = generation.choices[index]
        try:
            with closing(self._llm.stream(choice.prompt_token_ids, choice.params)) as steps:
                for progress in steps:
                    if generation.ended:
                        return
                    generation._post((index, progress))
        except Exception as error:
            # Whatever fails in the engine ends this request and no other one.
            logger.exception("generation failed")
            generation.ended = True
            message = f"generation failed: {type(error).__name__}: {error}"
            generation._post(ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="engine_error"))
