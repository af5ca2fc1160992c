"""Special tokens of a tokenizer: which files declare them, which ids they get, and which of them end an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lopa_ascend.config import DecodingParams, ParameterError
from lopa_ascend.families import FAMILIES
from lopa_ascend.text.prompt import Prompts
from lopa_ascend.text.special_ids import end_token_ids
from lopa_ascend.text.tokenizer import Tokenizer
from tests.tiny import SPECIAL, VOCAB_SIZE, tiny_tokenizer, write_tokenizer
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


def test_a_family_has_tokens_that_end_an_answer(tmp_path: Path) -> None:
    """LLaDA closes a turn with a token that none of its files names as an end."""
    *others, eot, mask = range(VOCAB_SIZE - 4, VOCAB_SIZE)
    names = ("<|endoftext|>", "<|startoftext|>", "<|eot_id|>", "<|mdm_mask|>")
    tokenizer = some(write_tokenizer(tmp_path / "instruct", special=names))
    assert end_token_ids(tokenizer, mask, others[:1], FAMILIES["llada"]) == (others[0], eot)
    assert end_token_ids(some(write_tokenizer(tmp_path / "base")), mask, others[:1], FAMILIES["llada"]) == (others[0],)
    names = ("<|endoftext|>", "<|startoftext|>", "<|role_end|>", "<|mask|>")
    second = some(write_tokenizer(tmp_path / "llada2", special=names))
    assert end_token_ids(second, mask, (), FAMILIES["llada2_moe"]) == (mask - 3, mask - 1)


def test_a_stop_string_that_is_a_special_token_is_a_stop_token(tmp_path: Path) -> None:
    tokenizer = some(write_tokenizer(tmp_path))
    prompts = Prompts(tokenizer, VOCAB_SIZE, VOCAB_SIZE - 1, "model")
    params = prompts.for_engine(DecodingParams(stop=("<|im_end|>", "the", "<|mask|>"), stop_token_ids=(7,)))
    assert params.stop_token_ids == (7, VOCAB_SIZE - 2)
    assert prompts.for_engine(DecodingParams(stop=("the",))).stop_token_ids == ()


# ---- special tokens in the texts of messages -------------------------------------------------------------------------

FIRST, MASK = VOCAB_SIZE - len(SPECIAL), VOCAB_SIZE - 1
FRAGMENTS = [
    *SPECIAL,
    "<|mask",
    "|>",
    "<",
    "<|im_end|><|mask|>",
    "<|mask|<|mask|>>",
    " the ",
    "\n",
    "\U0010ffff",
    "e\u0301",
]
contents = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=6).map("".join)
conversations = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), contents), min_size=1, max_size=4)


def prompts_of(tokenizer: Tokenizer, **options: Any) -> Prompts:
    return Prompts(tokenizer, VOCAB_SIZE, MASK, "model", **options)


@given(conversations)
@example([("user", "What does <|mask|> mean?"), ("assistant", "<|mask|> is the mask."), ("user", "<|im_end|>")])
def test_the_text_of_the_mask_in_a_message_stays_text(conversation: list[tuple[str, str]]) -> None:
    tokenizer = tiny_tokenizer()
    messages = [{"role": role, "content": content} for role, content in conversation]
    text = normalize("NFC", tokenizer.render(messages))
    ids = prompts_of(tokenizer).encode_chat(messages)
    assert MASK not in ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    if "<|mask|>" not in text:
        assert ids == tokenizer.encode(text)
    split = prompts_of(tokenizer, split_special_tokens=True).encode_chat(messages)
    assert tokenizer.decode(split, skip_special_tokens=False) == text
    empty = tokenizer.encode(tokenizer.render([{**message, "content": ""} for message in messages]))
    assert [token for token in split if token >= FIRST] == [token for token in empty if token >= FIRST]
    if not any(special in content for _, content in conversation for special in SPECIAL):
        assert split == ids


CONTENT = "{{ messages[0].content }}"


def test_a_text_that_normalisation_makes_the_mask_stays_text(tmp_path: Path) -> None:
    """The Kelvin sign becomes a K."""
    decoder = {str(MASK): {"content": "<|K|>", "special": True, "normalized": True}}
    path = write_tokenizer(tmp_path, special=("<|K|>",), added_tokens_decoder=decoder, chat_template=CONTENT)
    tokenizer = some(path)
    assert tokenizer.encode("<|\u212a|>") == [MASK]
    ids = prompts_of(tokenizer).encode_chat([{"role": "user", "content": "a<|\u212a|>"}])
    assert MASK not in ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|K|>"


def test_special_tokens_that_overlap_all_stay_text(tmp_path: Path) -> None:
    special = ("<|a|>", "|a|>", "abab")
    tokenizer = some(write_tokenizer(tmp_path, special=special, chat_template=CONTENT))
    prompts = prompts_of(tokenizer, split_special_tokens=True)
    for text in ("<|a|>", "|a|>|a|>", "ababab", "abababab<|a|><|a|>"):
        ids = prompts.encode_chat([{"role": "user", "content": text}])
        assert max(ids) < VOCAB_SIZE - len(special)
        assert tokenizer.decode(ids) == text


def test_special_tokens_count_in_templates_and_in_prompts(tmp_path: Path) -> None:
    template = "{{ '<|im_start|>' ~ messages[0].name ~ messages[0].content[0].text }}"
    split = prompts_of(some(write_tokenizer(tmp_path / "a", chat_template=template)), split_special_tokens=True)
    message = {"role": "user", "name": "<|im_start|>", "content": [{"text": "<|im_end|>"}]}
    first, *others = split.encode_chat([message])
    assert first == FIRST + 1
    assert max(others) < FIRST
    with pytest.raises(ParameterError, match="holds the mask"):
        prompts_of(some(write_tokenizer(tmp_path / "b", chat_template="<|mask|>"))).encode_chat([message])
    with pytest.raises(ParameterError, match="holds the mask"):
        split.encode("What is <|mask|>?")
    assert split.encode("<|im_end|>") == [FIRST + 2]
