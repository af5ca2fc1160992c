"""What the tokenizer says of the token ids that a model's configuration names: the mask, and the ends of answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from lopa_ascend.config.files import shown
from lopa_ascend.families import Family
from lopa_ascend.text.tokenizer import Tokenizer, TokenizerError

logger = logging.getLogger(__name__)


def check_special_ids(tokenizer: Tokenizer, path: Path, mask_token_id: int, eos_token_ids: Sequence[int]) -> None:
    """Refuses a mask that is a token of the BPE vocabulary, by TokenizerError; warns of what is usually a mistake.

    A mask without a token is right: some models have more rows of the embedding than the tokenizer has ids.
    """
    text = tokenizer.piece(mask_token_id).decode(errors="replace")
    if text and not tokenizer.is_special(mask_token_id):
        if not tokenizer.is_added(mask_token_id):
            raise TokenizerError(
                f"{path / 'config.json'}: mask_token_id is {mask_token_id}, which is the ordinary token "
                f"{shown(text)} of the tokenizer, expected the id of a special token"
            )
        logger.warning("%s: the mask %s (id %d) is not marked as special", path, shown(text), mask_token_id)
    named = tokenizer.special.get("mask_token")
    if named is not None and tokenizer.id_of(named) != mask_token_id:
        logger.warning(
            "%s: mask_token_id is %d in config.json, but mask_token %s of the tokenizer is %s; the former is used",
            path,
            mask_token_id,
            shown(named),
            tokenizer.id_of(named),
        )
    for token in eos_token_ids:
        piece = tokenizer.piece(token).decode(errors="replace")
        if piece and not tokenizer.is_added(token) and not tokenizer.is_special(token):
            logger.warning(
                "%s: eos_token_id %d is the ordinary token %s, which ends answers", path, token, shown(piece)
            )


def end_token_ids(
    tokenizer: Tokenizer, mask_token_id: int, eos_token_ids: Sequence[int], family: Family | None = None
) -> tuple[int, ...]:
    """The ids that end an answer: the configuration's, the family's, and the tokenizer's padding unless it is the mask.

    Models fill what follows an answer with padding, DiffuCoder with "<|dlm_pad|>", which its configuration does not
    name.
    """
    names = [tokenizer.special["pad_token"]] if "pad_token" in tokenizer.special else []
    names += [] if family is None else family.end_tokens
    ids = [*eos_token_ids]
    for found in map(tokenizer.id_of, names):
        if found is not None and found != mask_token_id and found not in ids:
            ids.append(found)
    return tuple(ids)
