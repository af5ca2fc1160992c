"""Calls of functions in the text of an answer, in the form of Hermes and Qwen, which all supported families share:

<tool_call>
{"name": "add", "arguments": {"a": 1}}
</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from lopa_ascend.text.stream import start_of_stop

BEGIN, END = "<tool_call>", "</tool_call>"
HEAD, MIDDLE, TAIL = f'{BEGIN}\n{{"name": "', '", "arguments": ', f"}}\n{END}"
"""A forced call: head, name, middle, arguments, tail. Neither a name nor JSON has ``TAIL`` in it."""
_MARK = re.compile(r'["\\<]')
_FORCED = re.compile(rf"\n?{re.escape(HEAD)}([^\"]*){re.escape(MIDDLE)}")


def call_grammar(
    schemas: Mapping[str, Mapping[str, Any]], *, several: bool, otherwise: Mapping[str, Any] | None = None
) -> str:
    """The Lark grammar of an answer that calls functions. ``schemas``: of their arguments, by name, which needs no
    escapes in JSON. ``several``: calls may follow one another. ``otherwise``: schema of an answer in place of calls."""
    names = range(len(schemas))
    rules = [
        "start: calls" + ("" if otherwise is None else " | answer"),
        r"calls: call" + (r' ("\n" call)*' if several else ""),
        f"call: {_literal(HEAD)} ({' | '.join(f'function{i}' for i in names)}) {_literal(TAIL)}",
    ]
    for i, (name, schema) in enumerate(schemas.items()):
        rules += [f"function{i}: {_literal(name + MIDDLE)} arguments{i}", f"arguments{i}: %json {json.dumps(schema)}"]
    if otherwise is not None:
        rules.append(f"answer: %json {json.dumps(otherwise)}")
    return "\n".join(rules)


def _literal(text: str) -> str:
    return json.dumps(text)


@dataclass
class ToolCall:
    name: str
    pieces: list[str] = field(default_factory=list)
    """Its arguments, JSON text, as far as they are known."""
    is_complete: bool = False

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


@dataclass
class ToolCallReader:
    """Splits the growing text of one answer into calls and what else it says.

    A push costs what is new in the text: at most two values of calls that did not end yet cover a character, as a quote
    that begins a string of one ends a string of the other.

    Args:
        names: of the functions. A call of another one is text, as is everything that is not a whole call.
        is_forced: a grammar has made the text, so a call is known by its beginning.
        several: calls after the first are not left out.
    """

    names: Collection[str]
    is_forced: bool = False
    several: bool = True
    calls: list[ToolCall] = field(default_factory=list)
    _read: int = 0
    """Characters that are settled: they belong to a call, or have been said."""
    _seen: int = 0
    """Characters that need not be looked at again."""
    _begun: int | None = None
    """Where the value of a call begins that has not ended: its JSON, or if calls are forced its arguments."""
    _is_in_string: bool = False
    """Whether the character after ``_seen`` belongs to a string of that value."""

    def push(self, text: str, *, is_final: bool) -> str:
        """What the answer says beside its calls, as far as it is new. ``text`` is the whole so far."""
        said = list[str]()
        if not self.names:
            self._say(text, len(text), said, keep_space=True)
        advance = self._read_forced if self.is_forced else self._read_next
        while self.names and advance(text, is_final, said):
            pass
        return "".join(said)

    def _read_forced(self, text: str, is_final: bool, said: list[str]) -> bool:
        """Takes what is new of a call; returns whether it is whole. Nothing is said beside forced calls."""
        if self._begun is None:
            match = _FORCED.match(text, self._read)
            if match is None:
                return False
            self.calls.append(ToolCall(match[1]))
            self._begun = self._read = match.end()
        call, end = self.calls[-1], text.find(TAIL, self._read)
        known = end if end >= 0 else max(self._read, start_of_stop(text, (TAIL,)))
        if is_final and end < 0:
            call.is_complete = arguments_of(text[self._begun : known]) is not None
            if not call.is_complete:  # what may begin TAIL belongs to the arguments
                known = len(text)
                call.is_complete = arguments_of(text[self._begun :]) is not None
        call.pieces.append(text[self._read : known])
        self._read = known
        if end >= 0:
            call.is_complete, self._begun, self._read = True, None, end + len(TAIL)
        return end >= 0

    def _read_next(self, text: str, is_final: bool, said: list[str]) -> bool:
        """Settles the text up to the next call, and the call; returns whether more can be settled."""
        if self._begun is None:
            begin = text.find(BEGIN, self._seen)
            if begin < 0:
                end = len(text) if is_final else start_of_stop(text, (BEGIN,))
                self._say(text, end, said, keep_space=is_final and not self.calls)
                return False
            self._say(text, begin, said, keep_space=False)
            self._begun = self._seen = begin + len(BEGIN)
            self._is_in_string = False
        end = self._end_of_value(text)
        rest = text[end : end + len(END)]
        if not is_final and rest != END and END.startswith(rest):
            return False
        call = _call_of(text[self._begun : end]) if rest in (END, "") else None
        if call is None or call.name not in self.names:
            self._say(text, self._begun, said, keep_space=True)
        else:
            if self.several or not self.calls:
                self.calls.append(call)
            self._read = self._seen = end + len(rest)
        self._begun = None
        return True

    def _end_of_value(self, text: str) -> int:
        """Where the value ends that has begun: before the first "<" outside of its strings, or what JSON never has
        there; or all that there is of it."""
        while match := _MARK.search(text, self._seen):
            mark, self._seen = match[0], match.start()
            if not self._is_in_string and mark != '"':
                return self._seen
            if mark == "\\" and match.end() == len(text):  # what it escapes has not come yet
                break
            self._is_in_string ^= mark == '"'
            self._seen = match.end() + (mark == "\\")
        else:
            self._seen = len(text)
        return len(text)

    def _say(self, text: str, end: int, said: list[str], *, keep_space: bool) -> None:
        """Says the text up to ``end``. Without ``keep_space`` white space at its end stays unsettled, or is dropped
        with what is settled next."""
        if keep_space:
            said.append(text[self._read : end])
            self._read = end
        elif piece := text[self._seen : end].rstrip():
            said.append(text[self._read : self._seen] + piece)
            self._read = self._seen + len(piece)
        self._seen = end


def _call_of(text: str) -> ToolCall | None:
    """The call that a text is, in the forms that models write; None if it is none."""
    value = _object_of(text)
    if value is None or not isinstance(name := value.get("name"), str):
        return None
    arguments: Any = next((value[key] for key in ("arguments", "parameters") if value.get(key) is not None), {})
    if isinstance(arguments, str):
        arguments = arguments_of(arguments)
    if not isinstance(arguments, dict):
        return None
    return ToolCall(name, [json.dumps(arguments, ensure_ascii=False)], is_complete=True)


def arguments_of(text: str) -> dict[str, Any] | None:
    """The arguments of a call, of which nothing and null stand for none; None if the text is no object."""
    return {} if text.strip() in ("", "null") else _object_of(text)


def _object_of(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text.strip())
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
