"""Compiles grammars for a tokenizer, with llguidance: JSON schemas, expressions, choices and Lark grammars.

JSON is compact, ``{"a":1,"b":[2]}``, as OpenAI's is: whitespace between tokens would cost passes, and a model that does
not know when to stop could go on with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, takewhile
from typing import Any, TypeVar

import tokenizers
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from lopa_ascend.config import ParameterError
from lopa_ascend.config.errors import FieldPath
from lopa_ascend.text.json_rules import with_json_rules
from lopa_ascend.text.schemas import parts_alone
from lopa_ascend.text.tokenizer import Tokenizer
from lopa_ascend.types import Grammar, GrammarError

T = TypeVar("T")
_LIBC = ctypes.CDLL(None)

MAX_FORCED = 2**16
"""Most bytes, by the guard's tokens, that a grammar may force at the beginning. Longer texts fit into no answer."""
ENDLESS = "every text that keeps to it is too long, or has no end"
MAX_CACHED = 2**28
"""Bytes of the compiled grammars that are kept, if there is more than one."""
TRIMMED = 2**26
"""Bytes of a grammar from which on it is worth while to return free memory to the system."""
MAX_WORKERS = 4
"""Most grammars that a process compiles at the same time."""
STACK = 2**22
"""Bytes of stack that compiling may take."""
THREAD_STACK = 2**24
"""Bytes of stack of the engine's threads that compile."""


class Vocabulary:
    """A tokenizer as llguidance wants it. The file alone does not do: llguidance takes every added token <...> in it
    for a special one, which no text has, but encodes texts with it all the same.

    Ordinary tokens write the text of a special one. Other added tokens are tokens like any. ``tokens`` has the bytes of
    each token; the last one, which the model lacks, is llguidance's EOS. No text has the tokens in the set ``hidden``.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer):
        self._spell = tokenizer.spell
        self.special_token_ids = tokenizer.special_ids
        self.eos_token_id = tokenizer.num_token_ids
        self.tokens = [*map(tokenizer.piece, range(tokenizer.num_token_ids)), b""]
        hidden = {*self.special_token_ids, *(token for token, piece in enumerate(self.tokens) if not piece)}
        self.hidden = sum(1 << token for token in hidden)
        self._backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
        self._backend.encode_special_tokens = True
        self._backend.normalizer = None  # tokens that write other bytes would not fit
        self.compiled = LLTokenizer(TokenizerWrapper(self))

    def __call__(self, text: bytes) -> list[int]:
        """The tokens of exactly these bytes."""
        tokens: list[int] = self._backend.encode(text.decode(), add_special_tokens=False).ids
        if b"".join(self.tokens[token] for token in tokens) == text:
            return tokens
        return self._spell(text, self.hidden)  # a token took whitespace with it, or the tokenizer begins with a space

    def without(self, tokens: Sequence[int], hidden: int) -> list[int]:
        """Tokens with the same bytes, none of them in the set ``hidden``."""
        spelled = ([token] if not hidden >> token & 1 else self._spell(self.tokens[token], hidden) for token in tokens)
        return list(chain.from_iterable(spelled))


class GrammarMatcher:
    """Follows a text; see ``decode.constraint.Matcher``. Token ids in ``ends`` end the answer, and write no text."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, ends: Sequence[int] = ()):
        self._matcher, self._vocabulary = matcher, vocabulary
        self._hidden = vocabulary.hidden | sum(1 << token for token in set(ends) if not vocabulary.hidden >> token & 1)

    def allowed(self) -> int:
        return int.from_bytes(self._checked(self._matcher.compute_bitmask()), "little") & ~self._hidden

    def accept(self, tokens: Sequence[int]) -> int:
        known = list(takewhile(lambda token: not self._hidden >> token & 1, tokens))
        return self._checked(self._matcher.try_consume_tokens(known)) if known else 0

    def roll_back(self, count: int) -> None:
        self._checked(self._matcher.rollback(count))

    @property
    def is_complete(self) -> bool:
        return self._checked(self._matcher.is_accepting())

    @property
    def is_over(self) -> bool:
        return self._checked(self._matcher.is_stopped())

    def forced(self) -> list[int]:
        return self._vocabulary.without(self._checked(self._matcher.compute_ff_tokens()), self._hidden)

    @property
    def takes_any(self) -> bool:
        return False

    def ahead(self) -> Sequence[tuple[int, int]]:
        return ()

    def _checked(self, value: T) -> T:
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot be followed any further: {_reason(self._matcher.get_error())}")
        return value


class CompiledGrammar:
    """The grammar of a request, which may still be being compiled. Threads may share it."""

    def __init__(self, future: Future[LLMatcher], vocabulary: Vocabulary):
        self._future, self._vocabulary = future, vocabulary

    @property
    def is_done(self) -> bool:
        return self._future.done()

    def wait(self, timeout: float | None = None) -> None:
        wait([self._future], timeout)

    @property
    def error(self) -> str | None:
        """Why it cannot be used; waits until it is compiled."""
        if (failure := self._future.exception()) is not None:
            return f"the grammar cannot be compiled: {failure}"
        compiled = self._future.result()
        return _reason(compiled.get_error()) if compiled.is_error() else None

    def matcher(self, ends: Sequence[int] = ()) -> GrammarMatcher:
        """A matcher at the beginning of a text; waits until it is compiled. Raises GrammarError if it has an error."""
        if self.error is not None:
            raise GrammarError(self.error)
        return GrammarMatcher(self._future.result().deep_copy(), self._vocabulary, ends)


class Grammars:
    """Compiles grammars that a guard has let pass, in threads, and keeps the last ones. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer):
        self._vocabulary = Vocabulary(tokenizer)
        self._compiled: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()
        self._workers = ThreadPoolExecutor(num_workers(), "grammars")

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Begins to compile a grammar that is not known. Raises as ``source_of`` if no guard has let it pass."""
        with self._lock:
            compiled = self._compiled.pop(grammar, None)
            if compiled is None:
                asked = grammar if grammar.source else replace(grammar, source=source_of(grammar))
                with large_stack():
                    future = self._workers.submit(_compiled_and_trimmed, self._vocabulary.compiled, asked)
                compiled = CompiledGrammar(future, self._vocabulary)
            self._compiled[grammar] = compiled
            size = sum(map(_size, self._compiled))
            while size > MAX_CACHED and len(self._compiled) > 1:
                oldest, _ = self._compiled.popitem(last=False)
                size -= _size(oldest)
        return compiled

    def matcher(self, grammar: Grammar, ends: Sequence[int] = ()) -> GrammarMatcher:
        return self.compile(grammar).matcher(ends)


def _compiled_and_trimmed(vocabulary: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """See ``compiled_matcher``. What compiling took beside the result goes back to the system."""
    compiled = compiled_matcher(vocabulary, grammar)
    if grammar.compiled_bytes > TRIMMED and hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)
    return compiled


def _size(grammar: Grammar) -> int:
    """An estimate of the bytes that a compiled grammar has."""
    return max(grammar.compiled_bytes, 64 * len(grammar.text))


def num_workers() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_WORKERS, cores // 2))


@contextmanager
def large_stack() -> Iterator[None]:
    """Threads that begin here get the stack that compiling needs."""
    before = threading.stack_size(THREAD_STACK)
    try:
        yield
    finally:
        threading.stack_size(before)


# ---- what the guard's process runs, too ------------------------------------------------------------------------------


def compiled_matcher(vocabulary: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """A matcher for a grammar with its source; it may be one with an error. Other threads run meanwhile."""
    return LLMatcher(vocabulary, grammar.source, log_level=0, limits=_limits(grammar))


def _limits(grammar: Grammar) -> LLParserLimits:
    """Guard and engine share them, so the engine compiles what the guard lets pass. A token takes some ten milliseconds
    at most. Items are ways to read a beginning: a schema has up to 3 for each optional field. Other grammars can be
    ambiguous everywhere: a token's time grows with the square of the items."""
    is_schema = grammar.kind in ("json", "json_object")
    has_schemas = is_schema or "%json" in grammar.text
    return LLParserLimits(
        max_grammar_size=10_000 if is_schema else 50_000,  # 1,000 optional fields; 128 functions
        max_items_in_row=5000 if is_schema else 2000 if has_schemas else 500,
        step_max_items=50_000 if has_schemas else 5000,
        initial_lexer_fuel=200_000,
        max_lexer_states=50_000,
        verbose_errors=False,
    )


def faults(vocabulary: LLTokenizer, grammar: Grammar) -> Iterator[tuple[FieldPath, str]]:
    """Why a grammar with its source cannot be used, as path and message of a ParameterError, each time in more
    detail."""
    compiled = compiled_matcher(vocabulary, grammar)
    num_forced = 0
    while num_forced <= MAX_FORCED and (forced := compiled.compute_ff_tokens()):  # each time as far as limits allow
        num_forced += len(forced)
        compiled.consume_tokens(forced)
    goes_on = any(compiled.compute_bitmask()) or compiled.is_accepting()
    if compiled.is_error():
        reason = _reason(compiled.get_error())
        yield _path(grammar), reason
        places = (place for place, part in _parts(grammar) if _is_wrong(vocabulary, part))
        # llguidance says in words alone that the whole is too large.
        if "grammar size" not in reason and (place := next(places, None)) is not None:
            yield place, reason
    elif num_forced > MAX_FORCED:
        yield _path(grammar), ENDLESS
    elif not goes_on:
        yield _path(grammar), "no text keeps to it"


def suspects(vocabulary: LLTokenizer, grammar: Grammar) -> Iterator[FieldPath]:
    """The paths of a schema's parts, each before it is compiled by itself; at the end that of the grammar."""
    for place, part in _parts(grammar):
        yield place
        _is_wrong(vocabulary, part)
    yield _path(grammar)


def _path(grammar: Grammar) -> FieldPath:
    return ("structured_outputs", grammar.kind)


def _parts(grammar: Grammar) -> Iterator[tuple[FieldPath, Any]]:
    """The parts of a schema, with their paths; of other grammars none."""
    for place, part in parts_alone(json.loads(grammar.text)) if grammar.kind == "json" else ():
        yield (*_path(grammar), *place), part


def _is_wrong(vocabulary: LLTokenizer, schema: Any) -> bool:
    grammar = Grammar("json", json.dumps(schema))
    return bool(compiled_matcher(vocabulary, replace(grammar, source=source_of(grammar))).is_error())


def source_of(grammar: Grammar) -> str:
    """The grammar in a form of llguidance; a large schema takes seconds of Python. Raises ParameterError: what is
    wrong, not supported or too large, and where."""
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "choice":
        texts = (json.dumps(text, ensure_ascii=False) for text in json.loads(grammar.text))
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(texts)}")
    schema = {"json": grammar.text, "json_object": '{"type": "object"}'}.get(grammar.kind)
    try:
        rules = with_json_rules(grammar.text if schema is None else f"start: %json {schema}")
    except ParameterError as error:
        raise error.under(*_path(grammar)) from None
    return LLMatcher.grammar_from_lark(rules)


def _reason(error: str) -> str:
    """What a message of llguidance says, on one line. There are no codes, so limits are recognised by their text."""
    text = " ".join(error.partition("\n<")[0].split())
    if "ff_tokens" in text:  # the limit of what is forced
        return ENDLESS
    if text.startswith("NoExtension"):
        return "no text keeps to it"
    return "it is too large" if text.startswith("panic") else text[:500]
