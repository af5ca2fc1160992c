"""Whole conversations for training: system prompts, earlier turns and greetings around a problem, and typing errors."""

from __future__ import annotations

import random
import re

from scripts.problems.language import CHOICE
from scripts.problems.lexicon import WORDS
from scripts.problems.wordings import read

CHATS = read("chats")
"""By section of chats.txt."""
HELLO_ANSWER = "Hello! Give me an easy word problem with numbers up to 999."
BEYOND_ANSWER = "Sorry, I can only solve easy word problems with numbers up to 999."


def pick(rng: random.Random, templates: list[str]) -> str:
    """One of the templates, with its choices made."""
    text = rng.choice(templates)
    while CHOICE.search(text):
        text = CHOICE.sub(lambda found: rng.choice(found[1].split("|")), text, count=1)
    for name, words in (("{t}", "topics"), ("{c}", "countries")):
        text = text.replace(name, rng.choice(WORDS[words]))
    while "{n}" in text:
        text = text.replace("{n}", str(rng.randint(2, 99)), 1)
    return text.strip()


def small_talk(rng: random.Random) -> tuple[str, str]:
    """Something that is no problem, and the short answer to it."""
    if rng.random() < 0.4:
        return pick(rng, CHATS["greetings"]), HELLO_ANSWER
    return pick(rng, CHATS["beyond"]), BEYOND_ANSWER


def system_prompt(rng: random.Random) -> str:
    """One or two instructions."""
    text = pick(rng, CHATS["system prompts"])
    return f"{text} {pick(rng, CHATS['system prompts'])}" if rng.random() < 0.3 else text


def typed(rng: random.Random, question: str) -> str:
    """A question as somebody may type it: lower case, punctuation missing or doubled, a few words around."""
    text = question
    if rng.random() < 0.08:
        text = f"{pick(rng, CHATS['before'])} {text}"
    if rng.random() < 0.04:
        text = f"{text} {pick(rng, CHATS['after'])}"
    if rng.random() < 0.12:
        text = text.lower()
    style = rng.random()
    if style < 0.12:
        text = text.rstrip("?.")
    elif style < 0.14:
        text = re.sub(r"[?.]$", lambda found: rng.choice(("??", " ?", "?!", "...", ".", "?.")), text)
    style = rng.random()
    if style < 0.03:
        text = text.replace(". ", rng.choice(("  ", ".  ", ", ", ".. ", ".\n", "\n", " . ", "! ", "; ")))
    elif style < 0.05:
        text = re.sub("[.,]", "", text)
    elif style < 0.08:
        text = re.sub(" ", lambda found: "  " if rng.random() < 0.1 else " ", text)
    elif style < 0.085:
        text = text.upper()
    if rng.random() < 0.1:
        text += rng.choice(("\n", "\n", "\n", " ", "\n\n", "  "))
    if rng.random() < 0.02:
        text = rng.choice(("\n", " ", "  ")) + text
    return text
