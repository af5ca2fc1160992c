"""Chat templates, which are programs of strangers: they run in processes of their own, with little time and memory.

A process stays for the next template, so that rendering takes no longer than it would here.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

TEMPLATE_TIMEOUT = 5.0
"""Most seconds of processor time in which a template renders a conversation. Loops in loops can take for ever."""
PATIENCE = 30.0
"""Seconds after which a process that does not answer, because it is stopped or the machine is busy, is given up."""
MAX_SIZE = 2**24
"""Most characters of what a template makes."""
MAX_MEMORY = 2**29
"""Bytes that a template may take."""

_COMMAND = (sys.executable, "-c", "from lopa_ascend.text.rendering import main; main()")


class TemplateError(ValueError):
    """A template is no template, or refuses the messages."""


class LimitError(ValueError):
    """A template takes too long, or makes too much."""


class ChatTemplate:
    """A chat template, and the special tokens that it may use, by name. Raises TemplateError if it is no Jinja
    template, LimitError if compiling it exceeds the limits."""

    def __init__(self, source: str, tokens: Mapping[str, str]):
        self._source, self._tokens = source, dict(tokens)
        self.variables = frozenset(_ask(source, None)["variables"])
        self.free_variables = self.variables - {"messages", "tools", "add_generation_prompt", *tokens}
        """What it reads beside the conversation."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that the template makes of a conversation, up to where the assistant's answer begins. Functions in
        ``tools`` have the form of OpenAI's chat completions. Raises TemplateError if the template refuses the messages,
        or they cannot be sent to a process; LimitError if it takes too long, or makes too much."""
        own = {"messages": messages, "tools": tools or None, "add_generation_prompt": True, **self._tokens}
        text: str = _ask(self._source, {"documents": None, **(variables or {}), **own})["text"]
        return text


# ---- the processes ---------------------------------------------------------------------------------------------------

_idle: list[subprocess.Popen[bytes]] = []
"""Processes that wait for a request. There are at most as many as threads that render at the same time."""


def _ask(source: str, values: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a process answers about a template: its variables, or with ``values`` its text."""
    limits = {"timeout": TEMPLATE_TIMEOUT, "max_size": MAX_SIZE, "max_memory": MAX_MEMORY}
    try:
        request = pickle.dumps({"source": source, "values": values, **limits})
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
        raise TemplateError(str(error)) from error
    process = _take()
    try:
        line = _exchange(process, request)
    except BaseException:  # an interrupt: the answer would be taken for that of the next request
        _end(process)
        raise
    if not line:
        raise LimitError(_reason(_end(process)))
    _idle.append(process)
    answer: dict[str, Any] = json.loads(line)
    if "limit" in answer:
        raise LimitError(answer["limit"])
    if "refusal" in answer:
        raise TemplateError(answer["refusal"])
    return answer


def _take() -> subprocess.Popen[bytes]:
    while _idle:
        try:
            process = _idle.pop()
        except IndexError:  # another thread has taken it
            break
        if process.poll() is None:
            return process
    # In a session of its own, Ctrl-C does not reach it. It ends with its stdin, and so with this process.
    return subprocess.Popen(
        _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )


def _exchange(process: subprocess.Popen[bytes], request: bytes) -> bytes:
    """The answer to a request; empty if the process has ended, or does not answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(request)
        process.stdin.flush()
        answered, _, _ = select.select([process.stdout], [], [], PATIENCE)
        return process.stdout.readline() if answered else b""
    except BrokenPipeError:
        return b""


def _end(process: subprocess.Popen[bytes]) -> int:
    assert process.stdin is not None
    assert process.stdout is not None
    process.kill()
    process.stdout.close()
    with suppress(BrokenPipeError):  # there may be unsent bytes
        process.stdin.close()
    return process.wait()


def _reason(status: int) -> str:
    if status == -signal.SIGPROF:
        return f"takes longer than {TEMPLATE_TIMEOUT:g} s for the messages"
    if status == -signal.SIGKILL:
        return f"has no answer after {PATIENCE:g} s"
    return f"ends its process with the status {status}"


@atexit.register
def end_processes() -> None:
    while _idle:
        _end(_idle.pop())


os.register_at_fork(after_in_child=_idle.clear)  # their pipes belong to the parent
