"""Prompts of held-out problems."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lopa_ascend.demo import HELD_OUT

if TYPE_CHECKING:
    from lopa_ascend import LLM

RANDOM_LENGTH = 128
"""Tokens of a prompt of random ids."""
PROBLEMS = 60
"""Problems in a row out of which a prompt is cut."""


def questions(count: int) -> Iterable[str]:
    """Held-out problems, which come again if there are fewer."""
    texts = [json.loads(line)["question"] for line in HELD_OUT.read_text(encoding="utf-8").splitlines()]
    return itertools.islice(itertools.cycle(texts), count)


def chat(question: str) -> list[dict[str, str]]:
    """A conversation that is one question."""
    return [{"role": "user", "content": question}]


def text_prompts(llm: LLM, count: int, length: int | None = None) -> list[list[int]]:
    """Prompts of held-out problems; for a model without a tokenizer random token ids, the same ones every time.

    ``length`` tokens are cut out of many problems in a row; without it each is one problem, as a chat if the model has
    a template, or ``RANDOM_LENGTH`` random ids.
    """
    if llm.tokenizer is None:
        ids = [token for token in range(llm.config.vocab_size) if token != llm.config.mask_token_id]
        return [random.Random(index).choices(ids, k=length or RANDOM_LENGTH) for index in range(count)]
    if length is None:
        has_template = llm.tokenizer.chat_template is not None
        return [llm.tokenize_chat(chat(text)) if has_template else llm.tokenize(text) for text in questions(count)]
    texts = list(questions(count + PROBLEMS))
    long = ("\n".join(texts[index : index + PROBLEMS]) for index in range(count))
    return [list(itertools.islice(itertools.cycle(llm.tokenize(text)), length)) for text in long]
