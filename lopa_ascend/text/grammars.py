"""Compiles grammars for a tokenizer, with llguidance: JSON schemas, expressions, choices and Lark grammars.

JSON is compact, ``{"a":1,"b":[2]}``, as OpenAI's is: whitespace between tokens would cost passes, and a model that does
not know when to stop could go on with it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain, takewhile
from threading import Lock
from typing import Any, TypeVar

import tokenizers
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from lopa_ascend.config import ParameterError
from lopa_ascend.text.json_rules import with_json_rules
from lopa_ascend.text.schemas import place_of
from lopa_ascend.text.tokenizer import Tokenizer
from lopa_ascend.types import Grammar, GrammarError

T = TypeVar("T")

LIMITS = LLParserLimits(
    max_grammar_size=10_000,  # 1,000 optional fields
    initial_lexer_fuel=200_000,
    max_lexer_states=50_000,
    max_items_in_row=20_000,
    verbose_errors=False,
)
"""So that compiling takes less than a second and 100 MB whatever the grammar is, and a mask some milliseconds."""
MAX_FORCED = 2**14
"""Most tokens that a grammar may force at the beginning. A longer text has no end, or fits into no answer."""
MAX_CACHED = 64
"""Compiled grammars that are kept."""
_NAME = "structured_outputs"


class Vocabulary:
    """A tokenizer as llguidance wants it. From the file alone llguidance takes every added token of the form <...> for
    a special one, which no text has, but encodes texts with it all the same.

    Special tokens are no part of a text: where their text occurs, ordinary tokens write it. The other added tokens are
    tokens like any.

    Attributes:
        tokens: the bytes of each token. The last one, which the model does not have, is what llguidance calls EOS.
        hidden: set of the tokens that no text has.
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

    def __call__(self, text: bytes) -> list[int]:
        """The tokens of a text, whose bytes are its own, not one more or less."""
        tokens: list[int] = self._backend.encode(text.decode(), add_special_tokens=False).ids
        if b"".join(self.tokens[token] for token in tokens) == text:
            return tokens
        return self._spell(text, self.hidden)  # a token took whitespace with it, or the tokenizer begins with a space

    def without(self, tokens: Sequence[int], hidden: int) -> list[int]:
        """Tokens with the same bytes, none of which is in a set."""
        spelled = ([token] if not hidden >> token & 1 else self._spell(self.tokens[token], hidden) for token in tokens)
        return list(chain.from_iterable(spelled))


class GrammarMatcher:
    """Follows a text; see ``decode.constraint.Matcher``.

    Args:
        matcher: of llguidance, at the beginning.
        vocabulary: of the model.
        ends: token ids that end the answer. They write no text either.
    """

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

    def _checked(self, value: T) -> T:
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot be followed any further: {_reason(self._matcher.get_error())}")
        return value


class Grammars:
    """Compiles grammars for one tokenizer, and keeps the last ones. Threads may share it.

    Args:
        tokenizer: the model's.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._vocabulary = Vocabulary(tokenizer)
        self._tokenizer = LLTokenizer(TokenizerWrapper(self._vocabulary))
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def matcher(self, grammar: Grammar, ends: Sequence[int] = ()) -> GrammarMatcher:
        """A matcher at the beginning of a text.

        Args:
            ends: token ids that end the answer.

        Raises:
            ParameterError: the grammar has an error, what it uses is not supported, it is too large, or no text that
                ends keeps to it.
        """
        with self._lock:
            compiled = self._compiled.pop(grammar, None)
        if compiled is None:
            compiled = self._compile(grammar)
        with self._lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
            return GrammarMatcher(compiled.deep_copy(), self._vocabulary, ends)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        compiled = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=LIMITS)
        if compiled.is_error():
            place = place_of(json.loads(grammar.text), self._is_wrong) if grammar.kind == "json" else ""
            raise ParameterError(_NAME, f"{grammar.kind}{place}: {_reason(compiled.get_error())}")
        first = compiled.deep_copy()
        if len(first.compute_ff_tokens()) > MAX_FORCED:
            raise ParameterError(_NAME, f"{grammar.kind}: every text that keeps to it is too long, or has no end")
        if not (any(first.compute_bitmask()) or first.is_accepting()) or first.is_error():
            raise ParameterError(_NAME, f"{grammar.kind}: no text keeps to it")
        return compiled

    def _is_wrong(self, schema: Any) -> bool:
        source = _source(Grammar("json", json.dumps(schema)))
        return LLMatcher(self._tokenizer, source, log_level=0, limits=LIMITS).is_error()


def _source(grammar: Grammar) -> str:
    """The grammar in a form of llguidance."""
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "choice":
        texts = (json.dumps(text, ensure_ascii=False) for text in json.loads(grammar.text))
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(texts)}")
    schema = {"json": grammar.text, "json_object": '{"type": "object"}'}.get(grammar.kind)
    return LLMatcher.grammar_from_lark(with_json_rules(grammar.text if schema is None else f"start: %json {schema}"))


def _reason(error: str) -> str:
    """What a message of llguidance says, on one line."""
    text = " ".join(error.partition("\n<")[0].split())
    return "it is too large" if text.startswith("panic") else text[:500]
