"""Renders chat templates, which are programs of strangers: within limits of time and size, and without side effects."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

TEMPLATE_TIMEOUT = 5.0
"""Most seconds in which a template renders a conversation. Loops in loops can take for ever."""
MAX_SIZE = 2**24
"""Most characters of what a template makes, and most characters or items of a value that an operator makes."""

_deadline: ContextVar[float] = ContextVar("_deadline")
"""When the template that runs must have ended, in seconds of ``time.monotonic``."""


class LimitError(Exception):
    """A template takes too long, or makes too much."""


def _step() -> None:
    """Called for every step of a template that can be repeated: a turn of a loop, a call, an operator."""
    if time.monotonic() > _deadline.get():
        raise LimitError(f"takes longer than {TEMPLATE_TIMEOUT:g} s for the messages")


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise LimitError(f"makes more than {MAX_SIZE} characters or items of the messages")


def _size(value: object) -> int:
    """Characters or items; of a number what it counts as a width or a factor."""
    if isinstance(value, int):
        return abs(value)
    return len(value) if isinstance(value, Sized) else 1


class _Sandbox(ImmutableSandboxedEnvironment):
    """Runs templates as transformers does."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _step()
        if isinstance(getattr(obj, "__self__", None), str):  # such as "x".center(10**9)
            _check_size(max(map(_size, args), default=0))
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _step()
        if operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            _check_size(len(left) + len(right))
        if operator == "*" and (isinstance(left, Sized) or isinstance(right, Sized)):
            _check_size(_size(left) * _size(right))
        if operator == "%" and isinstance(left, str):
            parts = right if isinstance(right, tuple) else (right,)
            _check_size(len(left) * (1 + sum(map(_size, parts))))
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() * abs(right) * 8)
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """The tag that transformers adds to Jinja: ``{% generation %}`` around what a model has said."""

    tags = {"generation"}  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _TemplateNamespace(Namespace):
    """As in transformers: a template can store no name with which it could reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as Jinja declares it, so that ``self`` can be a name too
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}")


class _Bounded(NodeTransformer):
    """Makes a template count the turns of its loops and the characters that ``~`` joins."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "joined")


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _step()
        yield item


def _joined(values: Sequence[Any]) -> str:
    _step()
    texts = list(map(str, values))
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON that is not escaped for HTML, as Jinja's own filter does it."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _make_environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
    environment.filters |= {"tojson": _to_json, "counted": _counted, "joined": _joined}
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _TemplateNamespace,
    }
    del environment.globals["lipsum"]  # makes texts of any length
    return environment


_ENVIRONMENT = _make_environment()


class ChatTemplate:
    """A chat template, compiled.

    Args:
        source: its text.
        tokens: the special tokens that it may use, by name.

    Raises:
        TemplateSyntaxError, ValueError, RecursionError: it is no Jinja template.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]):
        tree = _ENVIRONMENT.parse(source)
        self.variables = meta.find_undeclared_variables(tree)
        """What it reads."""
        code = _ENVIRONMENT.compile(_Bounded().visit(tree))
        self._template = Template.from_code(_ENVIRONMENT, code, _ENVIRONMENT.make_globals(None))
        self._tokens = tokens

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The text that the template makes of a conversation, up to where the assistant's answer begins.

        Args:
            messages: the conversation.
            tools: functions that the answer may call, as OpenAI's chat completions take them.

        Raises:
            LimitError: it takes too long, or makes too much.
            Exception: whatever else the template raises.
        """
        _deadline.set(time.monotonic() + TEMPLATE_TIMEOUT)
        options = {"tools": tools or None, "documents": None, "add_generation_prompt": True}
        given = {"messages": messages, **options, **self._tokens}
        parts, size = [], 0
        for part in self._template.generate(given):
            size += len(part)
            _check_size(size)
            parts.append(part)
        return "".join(parts)
