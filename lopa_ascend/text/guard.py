"""Compiles a grammar in a process of its own first, so that no grammar ends, stalls or fills the process that asks.

A warm process has the vocabulary and forks for each grammar, with limits on time, memory and stack: what the fork does
is its end alone. The warm process starts with the first grammar, and ends when its socket closes, so with its parent.

    asker                        warm process                        fork
      | a socket's other end  -->  | fork  ------------------------>  | limits
      | the grammar  ----------------------------------------------->  | compiles
      | <-- a line for each thing found out ------------------------  | ends, as it may
      | <-- the last line: how it ended  | waits for it
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper

from lopa_ascend.config import ParameterError
from lopa_ascend.process.thread_turns import aside
from lopa_ascend.text.grammars import STACK, faults, num_workers, source_of, suspects
from lopa_ascend.text.tokenizer import Tokenizer
from lopa_ascend.types import Grammar

TIME = 2.0
"""Most CPU seconds for a grammar."""
PLACE_TIME = 0.7
"""CPU seconds to find the part of a schema that a limit was reached in."""
MEMORY = 2**29
"""Most bytes for a grammar, beside the vocabulary."""
PATIENCE = 30.0
"""Seconds after which a process that does not answer is given up."""
MAX_PASSED = 2**24
"""Characters of the grammars that are known to pass, and of their sources."""
_OUT_OF_MEMORY = 9
"""Exit status of a fork in which Python had no memory."""


class Guard:
    """Refuses grammars that could do harm, or cannot be used. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._process: _WarmProcess | None = None
        self._passed: OrderedDict[Grammar, Grammar] = OrderedDict()
        """The last grammars that have passed, each with its source."""
        self._lock = threading.Lock()
        self._turns = threading.Semaphore(num_workers())

    def close(self) -> None:
        """Ends the warm process. The next grammar starts another one."""
        if (process := self._process) is not None:
            process.close()

    def checked(self, grammar: Grammar) -> Grammar:
        """The grammar as the engine takes it. Raises ParameterError if it is wrong, not supported or too large, or no
        text that ends keeps to it."""
        with self._lock:
            passed = self._passed.pop(grammar, None)
        if passed is None:
            with aside(), self._turns:
                passed = self._compiled(grammar)
        with self._lock:
            self._passed[passed] = passed
            length = sum(len(known.text) + len(known.source) for known in self._passed)
            while length > MAX_PASSED:
                oldest, _ = self._passed.popitem(last=False)
                length -= len(oldest.text) + len(oldest.source)
        return replace(passed, thinking=grammar.thinking)

    def _compiled(self, grammar: Grammar) -> Grammar:
        found, status = self._ask(grammar, TIME)
        match found[-1:]:
            case [[[*place], str(refusal)]]:
                raise ParameterError(tuple(place), refusal)
            case [[source, num_bytes]] if not status:
                return Grammar(grammar.kind, grammar.text, source=source, compiled_bytes=num_bytes)
        places, place_status = self._ask(grammar, PLACE_TIME, wants_place=True)
        place = places[-1] if places and place_status else ["structured_outputs", grammar.kind]
        raise ParameterError(tuple(place), f"{_explain(status)}; make it simpler")

    def _ask(self, grammar: Grammar, seconds: float, *, wants_place: bool = False) -> tuple[list[Any], int]:
        request = json.dumps([grammar.kind, grammar.text, seconds, wants_place]).encode()
        for _ in range(2):  # the warm process may have ended, or been killed
            process = self._warm_process()
            try:
                return process.ask(request)
            except TimeoutError:
                process.close()
                return [], -signal.SIGPROF
            except OSError:
                process.close()
        raise RuntimeError("the process that compiles grammars ends; its message is on stderr")

    def _warm_process(self) -> _WarmProcess:
        with self._lock:
            if self._process is None or self._process.is_closed:
                self._process = _WarmProcess(self._tokenizer)
            return self._process


def _explain(status: int) -> str:
    """How a fork has ended."""
    if status == -signal.SIGPROF:
        return f"takes more than {TIME:g} s to compile"
    if status in (-signal.SIGABRT, _OUT_OF_MEMORY):
        return f"takes more than {MEMORY >> 20} MiB to compile"
    how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    return f"crashes the compiler ({how}), as what is too deep does"


class _WarmProcess:
    """The warm process; it ends with ``close``, with this object, and with this process."""

    def __init__(self, tokenizer: Tokenizer):
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                (sys.executable, "-m", "lopa_ascend.text.guard"),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal is for the parent
            )
        self._socket, self.pid = ours, process.pid
        self.close = weakref.finalize(self, _end, process, ours)
        with suppress(OSError):  # it has ended, and the first question finds that out
            tokens = [tokenizer.piece(token).decode("latin-1") for token in range(tokenizer.num_token_ids)]
            known = json.dumps([tokens, tokenizer.special_ids]).encode()
            ours.sendall(len(known).to_bytes(8, "little") + known)

    @property
    def is_closed(self) -> bool:
        return not self.close.alive

    def ask(self, request: bytes) -> tuple[list[Any], int]:
        """What a fork has found out, and its exit status as ``subprocess`` has it. Found out: why the grammar is
        refused, each time in more detail; or its source and the bytes it takes; or places. Raises TimeoutError, or
        OSError if the warm process has ended."""
        ours, theirs = socket.socketpair()
        with ours:
            ours.settimeout(PATIENCE)
            with theirs:
                socket.send_fds(self._socket, [b"."], [theirs.fileno()])
            with suppress(BrokenPipeError, ConnectionResetError):  # the fork has ended before it has read everything
                ours.sendall(request)
                ours.shutdown(socket.SHUT_WR)
            answer, mark, status = b"".join(iter(lambda: ours.recv(2**16), b"")).rpartition(b"\0")
        if not mark:
            raise ConnectionError
        whole = answer[: answer.rfind(b"\n") + 1]  # the fork may have ended in the middle of a line
        return [json.loads(line) for line in whole.splitlines()], int(status)


def _end(process: subprocess.Popen[bytes], link: socket.socket) -> None:
    link.close()
    process.kill()
    process.wait()


# ---- the warm process ------------------------------------------------------------------------------------------------


def main() -> None:
    """Forks for each socket that comes over stdin, until that is closed."""
    control = socket.socket(fileno=0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a parent may ignore it
    known = json.loads(_read(control, int.from_bytes(_read(control, 8), "little")))
    vocabulary = LLTokenizer(TokenizerWrapper(_Tokens(*known)))
    gc.freeze()
    links: dict[int, int] = {}
    """By process id of a fork: the socket of who has asked."""

    def reap(*_: object) -> None:
        with suppress(ChildProcessError):  # there is none
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                link = links.pop(ended[0])
                with suppress(OSError):  # nobody waits any more
                    os.write(link, b"\0%d" % os.waitstatus_to_exitcode(ended[1]))
                os.close(link)

    signal.signal(signal.SIGCHLD, reap)
    while True:
        _, received, _, _ = socket.recv_fds(control, 1, 1)
        if not received:
            os._exit(0)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        if not (process := os.fork()):
            _answer(socket.socket(fileno=received[0]), vocabulary)
        links[process] = received[0]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])


class _Tokens:
    """As ``grammars.Vocabulary``, but texts are written by tokens of one byte: which they are does not matter here."""

    bos_token_id = None

    def __init__(self, tokens: list[str], special_ids: list[int]):
        self.tokens = [*(token.encode("latin-1") for token in tokens), b""]
        self.special_token_ids, self.eos_token_id = special_ids, len(tokens)
        self._of_byte = {token: number for number, token in enumerate(self.tokens) if len(token) == 1}

    def __call__(self, text: bytes) -> list[int]:
        return [self._of_byte[bytes([byte])] for byte in text if bytes([byte]) in self._of_byte]


def _read(link: socket.socket, size: int) -> bytes:
    """So many bytes; ends the process if the socket is closed before."""
    content = bytearray()
    while len(content) < size:
        if not (piece := link.recv(size - len(content))):
            os._exit(0)
        content += piece
    return bytes(content)


def _answer(link: socket.socket, vocabulary: LLTokenizer) -> None:
    """What a fork does: answers one question within limits, and ends."""
    status = 1
    try:
        os.dup2(1, 2)  # what ends it writes to stderr why
        kind, text, seconds, wants_place = json.loads(b"".join(iter(lambda: link.recv(2**16), b"")))
        _limit(resource.RLIMIT_STACK, STACK)
        _limit(resource.RLIMIT_DATA, _most_memory() + MEMORY)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        for finding in (suspects if wants_place else _findings)(vocabulary, Grammar(kind, text)):
            link.sendall(json.dumps(finding).encode() + b"\n")
        status = 0
    except MemoryError:
        status = _OUT_OF_MEMORY
    finally:
        os._exit(status)


def _findings(vocabulary: LLTokenizer, grammar: Grammar) -> Iterator[Any]:
    """Why a grammar is refused; or its source, with the bytes that it takes."""
    before, refusal = _most_memory(), None
    try:
        grammar = replace(grammar, source=source_of(grammar))
        for refusal in faults(vocabulary, grammar):
            yield refusal
        if refusal is None:
            yield grammar.source, _most_memory() - before
    except ParameterError as error:
        yield error.path, error.message
    except RecursionError:
        yield ("structured_outputs", grammar.kind), "is nested too deeply"


def _limit(kind: int, value: int) -> None:
    _, most = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if most == resource.RLIM_INFINITY else min(value, most), most))


def _most_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main()
