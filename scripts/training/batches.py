"""Batches of problems in tokens, of similar length."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from scripts.demo_problems import Problem, practice, problems
from scripts.demo_tokenizer import ASSISTANT, EOS
from scripts.training.focus import Focus, source_of
from scripts.training.noise import BLOCKS, LONGEST_BLOCK

MAX_PROMPT, MAX_ANSWER = 192, 4 * LONGEST_BLOCK - 1
"""Tokens; longer problems are left out."""
POOL = 256
"""Batches that are cut from one pool, sorted by length: the larger it is, the less of a batch is padding."""
ANSWER_STEP = 16
"""A pool is sorted by the lengths of answers in steps of so many tokens, and then by the lengths of prompts."""
SPELLED_SHARE, CUT_SHARE = 0.15, 0.1
"""Share of messages with words in smaller pieces than usual, and of the places within words that are cut in them: the
model learns to read words that are not in its vocabulary."""
CUT = re.compile(r"(?<=[A-Za-z])(?=[a-z])")
"""Places within words."""
PRACTICE_SHARE = 0.12
"""Share of sums to practise among the problems, before some of them are left out because the model solves them."""
EXTRA_BLOCK_SHARE = 0.15
"""Share of batches with one more block than the longest answer needs, all EOS, as decoding meets it."""


@dataclass
class Batch:
    """A batch of problems of similar length as tensors."""

    prompt: torch.Tensor
    """Token ids [n, p], padded on the left."""
    padding: torch.Tensor
    """Number of padding positions at the left of each prompt [n]."""
    answer: torch.Tensor
    """Token ids [n, l], padded with at least one EOS."""
    block: int
    """Positions of a block; 1 where answers are not padded to whole blocks."""
    sources: list[str]
    """What each problem was made from."""


@dataclass
class Example:
    """A problem in tokens."""

    prompt: list[int]
    answer: list[int]
    source: str
    """What the problem was made from."""


class Batches:
    """Endless batches of problems of similar length.

    Args:
        tokenizer: of prompts and answers.
        seed: of the problems.
        focus: which problems are kept.
        plain: problems in one clean message each, otherwise whole conversations.
        whole_blocks: answers of whole blocks, otherwise as long as the longest of a batch.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int, focus: Focus, *, plain: bool, whole_blocks: bool):
        self.plain = plain
        self.whole_blocks = whole_blocks
        self.focus = focus
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)
        self.problems = problems(seed, held_out=False, plain=plain, other_nouns=True)
        self.practice = practice(seed)
        self.vocab = tokenizer.get_vocab()
        self.eos = self.vocab[EOS]
        self.batches: Iterator[Batch] = iter(())

    def next(self, n: int) -> Batch:
        """The next n problems."""
        for batch in self.batches:
            return batch
        self.batches = iter(self._cut(self._pool(POOL * n), n))
        return next(self.batches)

    def _pool(self, size: int) -> list[Example]:
        """Problems whose length fits, with more of what the model fails at."""
        pool: list[Example] = []
        while len(pool) < size:
            problem = next(self.practice if self.rng.random() < PRACTICE_SHARE else self.problems)
            source = source_of(problem)
            if not self.focus.keeps(self.rng, source):
                continue
            example = Example(self.prompt(problem), self.tokenizer.encode(problem.answer).ids, source)
            if len(example.prompt) <= MAX_PROMPT and len(example.answer) <= MAX_ANSWER:
                pool.append(example)
        return pool

    def prompt(self, problem: Problem) -> list[int]:
        """Token ids of a conversation in the chat template, with some words in smaller pieces."""
        ids: list[int] = []
        for message in problem.messages:
            ids.append(self.vocab[f"<|{message['role']}|>"])
            ids += self._content(message["content"])
            if message["role"] == "assistant":
                ids.append(self.eos)
        return [*ids, self.vocab[ASSISTANT]]

    def _content(self, text: str) -> list[int]:
        """Token ids of a message; pieces of words that are cut do not merge."""
        if self.rng.random() >= SPELLED_SHARE:
            return self.tokenizer.encode(text).ids
        cuts = [found.start() for found in CUT.finditer(text) if self.rng.random() < CUT_SHARE]
        bounds = itertools.pairwise([0, *cuts, len(text)])
        return [token_id for start, end in bounds for token_id in self.tokenizer.encode(text[start:end]).ids]

    def _cut(self, pool: list[Example], n: int) -> list[Batch]:
        """Batches of n, in random order."""
        pool.sort(key=lambda example: (len(example.answer) // ANSWER_STEP, len(example.prompt)))
        batches = [self._padded(pool[i : i + n]) for i in range(0, len(pool), n)]
        self.rng.shuffle(batches)
        return batches

    def _padded(self, examples: list[Example]) -> Batch:
        """Prompts and answers as tensors."""
        prompt_length = max(len(example.prompt) for example in examples)
        length = max(len(example.answer) for example in examples) + 1
        block = self.rng.choice(BLOCKS) if self.whole_blocks else 1
        is_longer = self.whole_blocks and self.rng.random() < EXTRA_BLOCK_SHARE
        length = block * (math.ceil(length / block) + is_longer)
        padding = torch.tensor([prompt_length - len(example.prompt) for example in examples])
        prompts = [[self.eos] * (prompt_length - len(example.prompt)) + example.prompt for example in examples]
        answers = [example.answer + [self.eos] * (length - len(example.answer)) for example in examples]
        sources = [example.source for example in examples]
        return Batch(torch.tensor(prompts), padding, torch.tensor(answers), block, sources)
