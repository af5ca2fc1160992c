"""Builds the bundled model's tokenizer: byte-level BPE over the words of the demo problems, in Qwen2's file format."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.demo_problems import problems

# Qwen2's split: words with their leading space, single digits, runs of punctuation.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
EOS, USER, ASSISTANT, MASK = "<|endoftext|>", "<|user|>", "<|assistant|>", "<|mask|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|endoftext|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build(folder: Path, seed: int = 0, corpus_size: int = 20_000) -> Tokenizer:
    """Trains the tokenizer and writes vocab.json, merges.txt and tokenizer_config.json; the mask is the last id."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    corpus = (p.question + "\n" + p.answer for p in itertools.islice(problems(seed, held_out=False), corpus_size))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=2048, initial_alphabet=alphabet, min_frequency=200, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.model.save(str(folder))
    size = tokenizer.get_vocab_size()
    specials = (EOS, USER, ASSISTANT, MASK)
    added = {
        str(size + i): {
            "content": t,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
            "special": True,
        }
        for i, t in enumerate(specials)
    }
    config = {
        "tokenizer_class": "DreamTokenizer",
        "added_tokens_decoder": added,
        "eos_token": EOS,
        "pad_token": EOS,
        "mask_token": MASK,
        "bos_token": None,
        "add_prefix_space": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    tokenizer.add_special_tokens(list(specials))
    return tokenizer
