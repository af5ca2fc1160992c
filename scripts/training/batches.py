"""Batches of problems in tokens, of similar length."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from scripts.demo_problems import Problem, practice, problems
from scripts.demo_tokenizer import ASSISTANT, EOS
from scripts.training.noise import BLOCK

MAX_PROMPT, MAX_ANSWER = 192, 4 * BLOCK - 1
"""Tokens; longer problems are left out."""
POOL = 64
"""Batches that are cut from one pool, sorted by length."""
SPELLED_SHARE, CUT_SHARE = 0.15, 0.1
"""Share of messages with words in smaller pieces than usual, and of the places within words that are cut in them: the
model learns to read words that are not in its vocabulary."""
CUT = re.compile(r"(?<=[A-Za-z])(?=[a-z])")
"""Places within words."""
PRACTICE_SHARE = 0.3
"""Share of sums to practise among the problems."""
EXTRA_BLOCK_SHARE = 0.15
"""Share of batches with one more block than the longest answer needs, all EOS, as decoding meets it."""


@dataclass
class Tokens:
    """Problems of similar length."""

    prompt: torch.Tensor
    """Token ids [n, p], padded on the left."""
    padding: torch.Tensor
    """Positions of padding at the left of each prompt [n]."""
    answer: torch.Tensor
    """Token ids [n, a], padded with at least one EOS."""


class Batches:
    """Endless batches of problems of similar length.

    Args:
        tokenizer: of prompts and answers.
        seed: of the problems.
        plain: problems in one clean message each, and answers as long as the longest of a batch; otherwise whole
            conversations, and answers of whole blocks.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int, *, plain: bool):
        self.plain = plain
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)
        self.problems = problems(seed, held_out=False, plain=plain)
        self.practice = practice(seed)
        self.vocab = tokenizer.get_vocab()
        self.eos = self.vocab[EOS]
        self.batches: Iterator[Tokens] = iter(())

    def next(self, n: int) -> Tokens:
        """The next n problems."""
        for tokens in self.batches:
            return tokens
        self.batches = iter(self._cut(self._pool(POOL * n), n))
        return next(self.batches)

    def _pool(self, size: int) -> list[tuple[list[int], list[int]]]:
        """Token ids of prompts and answers."""
        pool: list[tuple[list[int], list[int]]] = []
        while len(pool) < size:
            problem = next(self.practice if self.rng.random() < PRACTICE_SHARE else self.problems)
            prompt = self.prompt(problem)
            answer = self.tokenizer.encode(problem.answer).ids
            if len(prompt) <= MAX_PROMPT and len(answer) <= MAX_ANSWER:
                pool.append((prompt, answer))
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

    def _cut(self, pool: list[tuple[list[int], list[int]]], n: int) -> list[Tokens]:
        """Batches of n, in random order."""
        pool.sort(key=lambda pair: (len(pair[1]) // (8 if self.plain else BLOCK), len(pair[0])))
        batches = [self._padded(pool[i : i + n]) for i in range(0, len(pool), n)]
        self.rng.shuffle(batches)
        return batches

    def _padded(self, pairs: list[tuple[list[int], list[int]]]) -> Tokens:
        """Prompts and answers as tensors."""
        prompt_length = max(len(prompt) for prompt, _ in pairs)
        length = max(len(answer) for _, answer in pairs) + 1
        if not self.plain:
            length = BLOCK * (-(-length // BLOCK) + (self.rng.random() < EXTRA_BLOCK_SHARE))
        padding = torch.tensor([prompt_length - len(prompt) for prompt, _ in pairs])
        prompts = torch.tensor([[self.eos] * (prompt_length - len(prompt)) + prompt for prompt, _ in pairs])
        answers = torch.tensor([answer + [self.eos] * (length - len(answer)) for _, answer in pairs])
        return Tokens(prompts, padding, answers)
