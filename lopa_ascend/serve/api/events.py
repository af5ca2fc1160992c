"""What a streamed answer is made of: server-sent events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from lopa_ascend.serve.api.encoding import as_line
from lopa_ascend.serve.api.errors import ApiError
from lopa_ascend.serve.api.schema import Json
from lopa_ascend.types import Progress, Update


class Encoder(ABC):
    """Makes the events of one stream. Its form is that of completions, unless a subclass has another."""

    end: ClassVar[bytes] = b"data: [DONE]\n\n"
    """The end of the stream, after the events of an answer and after those of a failure."""

    @abstractmethod
    def opening(self) -> list[Json]:
        """Events before the first update."""

    @abstractmethod
    def events(self, index: int, update: Update, progress: Progress) -> list[Json]:
        """Events for one update of the choice ``index``."""

    @abstractmethod
    def closing(self) -> list[Json]:
        """Events after the last update."""

    def failure(self, error: ApiError) -> list[Json]:
        """Events in place of the remaining ones, if the request fails after the stream has begun."""
        return [error.body()]

    def frame(self, event: Json) -> bytes:
        """An event as it is sent."""
        return b"data: " + as_line(event) + b"\n\n"
