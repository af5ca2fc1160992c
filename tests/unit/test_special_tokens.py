"""Special tokens of a tokenizer: which files declare them, which ids they get, and which of them end an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lopa_ascend.config import DecodingParams
from lopa_ascend.text.prompt import Prompts
from lopa_ascend.text.special_ids import end_token_ids
from tests.tiny import SPECIAL, VOCAB_SIZE, write_tokenizer
from tests.unit.loaded_tokenizer import edit, some


def test_special_tokens_of_older_files(tmp_path: Path) -> None:
    """added_tokens.json and special_tokens_map.json instead of added_tokens_decoder."""
    write_tokenizer(tmp_path, added_tokens_decoder=None, eos_token=None, pad_token=None, mask_token=None)
    first = VOCAB_SIZE - len(SPECIAL)
    (tmp_path / "added_tokens.json").write_text(json.dumps({token: first + i for i, token in enumerate(SPECIAL)}))
    names: dict[str, Any] = {"eos_token": {"content": SPECIAL[0]}, "mask_token": SPECIAL[-1]}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names | {"additional_special_tokens": [SPECIAL[1]]}))
    tokenizer = some(tmp_path)
    ids = tokenizer.encode("".join(SPECIAL))
    assert ids == list(range(first, VOCAB_SIZE))
    assert tokenizer.decode(ids) == SPECIAL[2]
    assert [tokenizer.is_special(token) for token in ids] == [True, True, False, True]


def test_files_of_older_directories_go_first_there_and_count_nowhere_else(tmp_path: Path) -> None:
    """As with transformers."""
    template = "{{ bos_token }}|{{ eos_token }}|{{ messages[0].content }}"
    names = {"bos_token": SPECIAL[1], "eos_token": None}
    write_tokenizer(tmp_path, chat_template=template)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"hello": VOCAB_SIZE + 5, "<other>": VOCAB_SIZE - 1}))
    newer = some(tmp_path)
    assert newer.special == {
        name: SPECIAL[place] for name, place in (("eos_token", 0), ("pad_token", 0), ("mask_token", -1))
    }
    assert newer.render([{"role": "user", "content": "hi"}]) == f"|{SPECIAL[0]}|hi"
    first = VOCAB_SIZE - len(SPECIAL)
    (tmp_path / "added_tokens.json").write_text(json.dumps({token: first + i for i, token in enumerate(SPECIAL)}))
    edit(tmp_path / "tokenizer_config.json", added_tokens_decoder=None)
    older = some(tmp_path)
    assert older.special == {"bos_token": SPECIAL[1], "pad_token": SPECIAL[0], "mask_token": SPECIAL[-1]}
    assert older.render([{"role": "user", "content": "hi"}]) == f"{SPECIAL[1]}||hi"


def test_extra_special_tokens(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, vocab_size=VOCAB_SIZE - 1, extra_special_tokens={"image": "<|image|>"})
    tokenizer = some(tmp_path)
    assert tokenizer.encode("<|image|>") == [VOCAB_SIZE - 1]
    assert tokenizer.is_special(VOCAB_SIZE - 1)
    assert tokenizer.num_token_ids == VOCAB_SIZE
    tokenizer.chat_template = "{{ image }}{{ messages[0].content }}"
    assert tokenizer.render([{"role": "user", "content": "hi"}]) == "<|image|>hi"


def test_added_token_outside_the_byte_alphabet_is_text(tmp_path: Path) -> None:
    tokenizer = some(
        write_tokenizer(tmp_path, additional_special_tokens=["caf\u00e9 \u6587"], vocab_size=VOCAB_SIZE - 1)
    )
    assert tokenizer.decode([VOCAB_SIZE - 1], skip_special_tokens=False) == "caf\u00e9 \u6587"


def test_names_that_are_in_no_vocabulary_get_ids_in_one_order(tmp_path: Path) -> None:
    """Ranks, and a server that starts again, must agree on them."""
    names: dict[str, Any] = {"cls_token": "<c>", "unk_token": "<u>", "sep_token": "<s>", "bos_token": "<b>"}
    tokenizer = some(write_tokenizer(tmp_path, vocab_size=VOCAB_SIZE - 4, **names))
    assert tokenizer.encode("<b><u><s><c>") == list(range(VOCAB_SIZE - 4, VOCAB_SIZE))


# ---- special tokens as ends ------------------------------------------------------------------------------------------


def test_padding_ends_an_answer_unless_it_is_the_mask(tmp_path: Path) -> None:
    """As in DiffuCoder, whose configuration names another end than its tokenizer's padding."""
    end, start, turn_end, mask = range(VOCAB_SIZE - 4, VOCAB_SIZE)
    same = some(write_tokenizer(tmp_path / "same"))
    assert end_token_ids(same, mask, [end]) == (end,)
    assert end_token_ids(same, mask, []) == (end,)
    own = some(write_tokenizer(tmp_path / "own", pad_token="<|im_end|>"))
    assert end_token_ids(own, mask, [end, start]) == (end, start, turn_end)
    assert end_token_ids(some(write_tokenizer(tmp_path / "mask", pad_token="<|mask|>")), mask, [end]) == (end,)
    assert end_token_ids(some(write_tokenizer(tmp_path / "none", pad_token=None)), mask, [end]) == (end,)


def test_a_stop_string_that_is_a_special_token_is_a_stop_token(tmp_path: Path) -> None:
    tokenizer = some(write_tokenizer(tmp_path))
    prompts = Prompts(tokenizer, VOCAB_SIZE, VOCAB_SIZE - 1, "model")
    params = prompts.for_engine(DecodingParams(stop=("<|im_end|>", "the", "<|mask|>"), stop_token_ids=(7,)))
    assert params.stop_token_ids == (7, VOCAB_SIZE - 2)
    assert prompts.for_engine(DecodingParams(stop=("the",))).stop_token_ids == ()
