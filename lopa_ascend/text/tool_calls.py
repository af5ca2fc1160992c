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

from lopa_ascend.text.schemas import OPTIONS
from lopa_ascend.text.stream import start_of_stop

BEGIN, END = "<tool_call>", "</tool_call>"
HEAD, MIDDLE, TAIL = f'{BEGIN}\n{{"name": "', '", "arguments": ', f"}}\n{END}"
"""A forced call: head, name, middle, arguments, tail. Neither a name nor JSON has ``TAIL`` in it."""
MAX_PART = 8
"""A part of JSON that is refused because its end is missing, such as "fals", has fewer characters."""
_FORCED = re.compile(rf"\n?{re.escape(HEAD)}([^\"]*){re.escape(MIDDLE)}")


def call_grammar(
    schemas: Mapping[str, Mapping[str, Any]], *, several: bool, otherwise: Mapping[str, Any] | None = None
) -> str:
    """The Lark grammar of an answer that calls functions.

    Args:
        schemas: by name of each function, which needs no escapes in JSON: the JSON Schema of its arguments.
        several: there may be more than one call.
        otherwise: the JSON Schema of an answer that may come in place of calls.
    """
    names = range(len(schemas))
    rules = [
        "start: calls" + ("" if otherwise is None else " | answer"),
        r"calls: call" + (r' ("\n" call)*' if several else ""),
        f"call: {_literal(HEAD)} ({' | '.join(f'function{i}' for i in names)}) {_literal(TAIL)}",
    ]
    for i, (name, schema) in enumerate(schemas.items()):
        rules += [f"function{i}: {_literal(name + MIDDLE)} arguments{i}", f"arguments{i}: %json {_compact(schema)}"]
    if otherwise is not None:
        rules.append(f"answer: %json {_compact(otherwise)}")
    return "\n".join(rules)


def _compact(schema: Mapping[str, Any]) -> str:
    """A schema with the options that ``grammars`` compiles every schema with."""
    return json.dumps({**schema, "x-guidance": OPTIONS})


def _literal(text: str) -> str:
    return json.dumps(text)


@dataclass
class ToolCall:
    """One call."""

    name: str
    arguments: str
    """JSON text. It only grows until the call is complete."""
    is_complete: bool = True


@dataclass
class ToolCallReader:
    """Splits the growing text of one answer into calls and what else it says.

    Attributes:
        calls: the calls so far.

    Args:
        names: of the functions. A call of another one is text, as is everything that is not a whole call.
        is_forced: a grammar has made the text, so that a call is known by its beginning.
        several: calls after the first are not left out.
    """

    names: Collection[str]
    is_forced: bool = False
    several: bool = True
    calls: list[ToolCall] = field(default_factory=list)
    _content: str = ""
    _read: int = 0
    """Characters that are settled: they belong to a complete call or to the content."""

    def push(self, text: str, *, is_final: bool) -> str:
        """What the answer says beside its calls, so far. It only grows.

        Args:
            text: the whole text so far.
            is_final: nothing follows.
        """
        if not self.names:
            return text
        if self.is_forced:
            self._read_forced(text, is_final)
        else:
            while self._read_next(text, is_final):
                pass
        return self._content

    def _read_forced(self, text: str, is_final: bool) -> None:
        while match := _FORCED.match(text, self._read):
            begin, end = match.end(), text.find(TAIL, match.end())
            if self.calls and not self.calls[-1].is_complete:
                self.calls.pop()
            if end < 0:
                so_far = text[begin:] if is_final else text[begin : max(begin, start_of_stop(text, (TAIL,)))]
                self.calls.append(ToolCall(match[1], so_far, is_complete=False))
                return
            self.calls.append(ToolCall(match[1], text[begin:end]))
            self._read = end + len(TAIL)

    def _read_next(self, text: str, is_final: bool) -> bool:
        """Settles the text up to the next call, and the call; returns whether more can be settled."""
        begin = text.find(BEGIN, self._read)
        if begin < 0:
            end = len(text) if is_final else start_of_stop(text, (BEGIN,))
            self._say(text, end, keep_space=is_final and not self.calls)
            return False
        if END in text[begin:] or is_final:
            found = self._call_at(text, begin + len(BEGIN))
            if found is not None:
                call, end = found
                self._say(text, begin, keep_space=False)
                if self.several or not self.calls:
                    self.calls.append(call)
                self._read = end
                return True
            if is_final or not _is_open(text, begin + len(BEGIN)):
                self._say(text, begin + len(BEGIN), keep_space=True)
                return True
        self._say(text, begin, keep_space=False)
        return False

    def _say(self, text: str, end: int, *, keep_space: bool) -> None:
        """Adds the text up to ``end`` to the content; without ``keep_space`` white space at its end stays unsettled, or
        is dropped with what is settled next."""
        piece = text[self._read : max(end, self._read)]
        piece = piece if keep_space else piece.rstrip()
        self._content += piece
        self._read += len(piece)

    def _call_at(self, text: str, begin: int) -> tuple[ToolCall, int] | None:
        """The call whose JSON begins at ``begin`` or after white space there, and where it ends; None if there is
        none."""
        begin = _after_space(text, begin)
        try:
            value, end = json.JSONDecoder().raw_decode(text, begin)
        except (ValueError, RecursionError):
            return None
        end = _after_space(text, end)
        if not text.startswith(END, end) or not isinstance(value, dict):
            return None
        name, arguments = value.get("name"), value.get("arguments", {})
        if not isinstance(name, str) or name not in self.names or not isinstance(arguments, dict):
            return None
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False)), end + len(END)


def _is_open(text: str, begin: int) -> bool:
    """Whether what is there of a call's JSON may become one: ``END`` stands in a string of it."""
    try:
        _, end = json.JSONDecoder().raw_decode(text, _after_space(text, begin))
    except json.JSONDecodeError as error:
        is_at_end = error.pos + MAX_PART > len(text.rstrip())
        return is_at_end or error.msg.startswith("Unterminated string")
    except RecursionError:
        return False
    return END.startswith(text[_after_space(text, end) :])


def _after_space(text: str, begin: int) -> int:
    while begin < len(text) and text[begin].isspace():
        begin += 1
    return begin
