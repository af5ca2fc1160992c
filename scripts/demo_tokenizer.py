"""Builds the bundled model's tokenizer: byte-level BPE over the words of the demo problems, in Qwen2's file format.

    python -m scripts.demo_tokenizer build/tokenizer

Writes vocab.json, merges.txt and tokenizer_config.json into the folder; takes some seconds. The same seed gives the
same files. scripts.train_demo does this first.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from lopa_ascend.config.help import HelpFormatter
from lopa_ascend.text.tokenizer_files import WORD_PATTERN
from scripts.arguments import number_from
from scripts.demo_problems import problems

CORPUS_SIZE = 20_000
"""Problems that the vocabulary is made from."""
VOCABULARY = 2048
"""Tokens, the special ones included."""
EOS, SYSTEM, USER, ASSISTANT, MASK = "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|mask|>"
SPECIALS = (EOS, SYSTEM, USER, ASSISTANT, MASK)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|endoftext|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def load(folder: Path) -> Tokenizer:
    """The tokenizer that ``build`` wrote."""
    tokenizer = _untrained(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def build(folder: Path, seed: int = 0, corpus_size: int = CORPUS_SIZE) -> Tokenizer:
    """Trains the tokenizer and writes vocab.json, merges.txt and tokenizer_config.json; the mask is the last id.

    Args:
        folder: where the files go.
        seed: of the problems that the vocabulary is made from.
        corpus_size: how many problems.
    """
    tokenizer = _train(seed, corpus_size)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.model.save(str(folder))
    _write_config(folder / "tokenizer_config.json", SPECIALS, first_id=tokenizer.get_vocab_size())
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def _untrained(model: models.BPE) -> Tokenizer:
    """A tokenizer without special tokens around a model."""
    tokenizer = Tokenizer(model)
    split_words = pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split_words, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _train(seed: int, corpus_size: int) -> Tokenizer:
    """The tokenizer without special tokens."""
    tokenizer = _untrained(models.BPE())
    chosen = itertools.islice(problems(seed, held_out=False), corpus_size)
    progress = tqdm(chosen, "tokenizer", corpus_size, unit="problem", disable=None, leave=False)
    corpus = (text for problem in progress for text in (*(m["content"] for m in problem.messages), problem.answer))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    size = VOCABULARY - len(SPECIALS)
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def _write_config(file: Path, specials: tuple[str, ...], first_id: int) -> None:
    """Writes tokenizer_config.json; the special tokens have the ids from ``first_id`` on."""
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    added = {str(token_id): {"content": token, **flags} for token_id, token in enumerate(specials, first_id)}
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": added,
        "eos_token": EOS,
        "pad_token": EOS,
        "mask_token": MASK,
        "bos_token": None,
        "add_prefix_space": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.demo_tokenizer",
        description=__doc__,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="where the files go")
    parser.add_argument("--seed", type=number_from(0), default=0, help="seed of the problems (default: 0)")
    parser.add_argument(
        "--corpus-size",
        type=number_from(1),
        default=CORPUS_SIZE,
        metavar="N",
        help=f"number of problems (default: {CORPUS_SIZE})",
    )
    args = parser.parse_args()
    tokenizer = build(args.folder, args.seed, args.corpus_size)
    print(f"{tokenizer.get_vocab_size()} tokens in {args.folder}")


if __name__ == "__main__":
    main()
