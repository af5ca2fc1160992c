"""Compiles and renders chat templates, in a process that ``sandbox`` starts.

Templates see what transformers shows them, and cannot reach into Python. Their time and memory are limited by the
kernel, so that no filter, method or operator needs a limit of its own.
"""

from __future__ import annotations

import json
import pickle
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Json = dict[str, Any]


class _GenerationTag(Extension):
    """transformers' tag ``{% generation %}`` around what a model has said."""

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


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON that is not escaped for HTML, as Jinja's own filter does it."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _make_environment() -> ImmutableSandboxedEnvironment:
    extensions = [_GenerationTag, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _TemplateNamespace,
    }
    return environment


_ENVIRONMENT = _make_environment()


@lru_cache(maxsize=16)
def _compiled(source: str) -> tuple[Template, list[str]]:
    tree = _ENVIRONMENT.parse(source)
    return _ENVIRONMENT.from_string(tree), sorted(meta.find_undeclared_variables(tree) - _ENVIRONMENT.globals.keys())


def _answer(source: str, values: Json | None, max_size: int) -> Json:
    try:
        template, variables = _compiled(source)
        if values is None:
            return {"variables": variables}
        text = template.render(values)
    except MemoryError:
        return {"limit": "needs too much memory for the messages"}
    except TemplateSyntaxError as error:
        return {"refusal": f"line {error.lineno}: {error.message}"}
    except RecursionError:
        return {"refusal": "is nested too deeply"}
    except Exception as error:  # noqa: BLE001  # a template is a program of the checkpoint's author, which may raise anything
        return {"refusal": str(error)}
    if len(text) > max_size:
        return {"limit": f"makes more than {max_size} characters of the messages"}
    return {"text": text}


def main() -> None:
    """Answers pickled requests on stdin by lines of JSON on stdout, until stdin or a limit ends this process."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    statm = Path("/proc/self/statm")  # other systems do not hold processes to a size of their address space
    taken = int(statm.read_text().split()[0]) * resource.getpagesize() if statm.exists() else 0
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        resource.setrlimit(resource.RLIMIT_AS, (taken + request["max_memory"],) * 2)
        signal.setitimer(signal.ITIMER_PROF, request["timeout"])
        answer = _answer(request["source"], request["values"], request["max_size"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
        sys.stdout.buffer.flush()
