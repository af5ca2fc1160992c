"""Tokenizer files, chat templates, and text to token ids and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from lopa_ascend.config import DecodingParams, ParameterError
from lopa_ascend.text import sandbox
from lopa_ascend.text.prompt import Prompts
from lopa_ascend.text.tokenizer import TokenizerError
from lopa_ascend.text.tokenizer_files import load_tokenizer
from tests.tiny import CHAT_TEMPLATE, SPECIAL, VOCAB_SIZE, tiny_tokenizer, write_tokenizer
from tests.unit.loaded_tokenizer import edit, some

TEXTS = [
    "",
    "hello the answer and  the   rest",
    "I'm sure we'll say it's theirs, they'd've gone; I'M SURE",
    "1234567 3.14 x2y 12,000",
    "na\u00efve caf\u00e9 e\u0301 \u6587\u5b57 \u0420\u0443\u0441 \u0639\u0631",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "a\n\nb\r\n  c\t\td \n \n",
    "  leading and trailing  ",
    "<|im_start|>user\nhello<|im_end|>\n<|mask|><|mask|> <|endoftext|>tail <|im_",
    "\u0120 \u00a0 \u2028 \x00 \x7f",
    "for (int i = 0; i < n; ++i) { a[i] += $x; }  // \u2026!!\n\n",
]


def qwen2(path: Path) -> Any:
    from transformers import Qwen2TokenizerFast

    edit(path / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    return Qwen2TokenizerFast.from_pretrained(str(path))


# ---- files ---------------------------------------------------------------------------------------------------------


def test_equals_transformers(tmp_path: Path) -> None:
    ours, theirs = some(write_tokenizer(tmp_path)), qwen2(tmp_path)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert ours.num_token_ids == len(theirs) == VOCAB_SIZE


def test_chat_equals_transformers(tmp_path: Path) -> None:
    ours, theirs = some(write_tokenizer(tmp_path)), qwen2(tmp_path)
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello <|im_end|> \U0001f600"}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.render(messages) == text
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\n")


def test_tokenizer_json_is_the_same(tmp_path: Path) -> None:
    source, target = write_tokenizer(tmp_path / "a"), tmp_path / "b"
    ours = some(source)
    qwen2(source).save_pretrained(str(target))
    for name in ("vocab.json", "merges.txt"):
        (target / name).unlink(missing_ok=True)
    other = some(target)
    assert (target / "tokenizer.json").exists()
    for text in TEXTS:
        assert other.encode(text) == ours.encode(text)
        assert other.decode(other.encode(text)) == ours.decode(ours.encode(text))
    messages = [{"role": "user", "content": "hello"}]
    assert other.render(messages) == ours.render(messages)


def test_truncation_and_padding_in_tokenizer_json_are_ignored(tmp_path: Path) -> None:
    source = write_tokenizer(tmp_path)
    backend = some(source)._backend
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(source / "tokenizer.json"))
    assert some(source).encode("hello hello hello the") == tiny_tokenizer().encode("hello hello hello the")


def test_no_tokenizer_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path, 9) is None


def test_larger_than_the_model(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    assert some(tmp_path).num_token_ids == VOCAB_SIZE
    with pytest.raises(TokenizerError, match=r"vocab\.json: has ids up to 319, expected less than vocab_size 319"):
        load_tokenizer(tmp_path, VOCAB_SIZE - 1)


def _merge(line: str) -> Callable[[Path], object]:
    return lambda path: (path / "merges.txt").open("a", encoding="utf-8").write(line)


def _config(**changes: Any) -> Callable[[Path], object]:
    return lambda path: edit(path / "tokenizer_config.json", **changes)


def _older(file: str, text: str) -> Callable[[Path], object]:
    """A file in a directory whose tokenizer_config.json has no added tokens."""

    def change(path: Path) -> None:
        edit(path / "tokenizer_config.json", added_tokens_decoder=None)
        (path / file).write_text(text)

    return change


EMPTY = {"vocab.json": "{}", "merges.txt": "", "tokenizer_config.json": "{}"}
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no merges": (lambda p: (p / "merges.txt").unlink(), "merges.txt: is missing"),
    "no vocab": (lambda p: (p / "vocab.json").unlink(), "vocab.json: is missing"),
    "broken vocab": (lambda p: (p / "vocab.json").write_text("{"), "vocab.json: is not valid JSON"),
    "vocab is a list": (
        lambda p: (p / "vocab.json").write_text("[]"),
        "vocab.json: expected a JSON object, found list",
    ),
    "vocab is empty": (
        lambda p: [(p / name).write_text(text) for name, text in EMPTY.items()],
        "vocab.json: has no tokens",
    ),
    "vocab is not text": (
        lambda p: (p / "vocab.json").write_bytes(b"\xff\xfe"),
        "vocab.json: is not valid JSON ('utf-8' codec",
    ),
    "id is text": (lambda p: edit(p / "vocab.json", a="x"), "vocab.json: token 'a' has the id 'x'"),
    "merge of three": (_merge("a b c\n"), "merges.txt: line 62: 'a b c' is not two tokens"),
    "merge of unknown": (_merge("hello hello\n"), "merges.txt: line 62: 'hello hello' is not two tokens"),
    "broken config": (
        lambda p: (p / "tokenizer_config.json").write_text("{"),
        "tokenizer_config.json: is not valid JSON",
    ),
    "another class": (
        _config(tokenizer_class="GPT2Tokenizer"),
        "tokenizer_config.json: tokenizer_class is 'GPT2Tokenizer', expected one of Qwen2Tokenizer, ",
    ),
    "broken map": (_older("special_tokens_map.json", "{"), "special_tokens_map.json: is not valid"),
    "broken tokens": (_older("added_tokens.json", "{"), "added_tokens.json: is not valid JSON"),
    "broken tokenizer": (lambda p: (p / "tokenizer.json").write_text("{"), "tokenizer.json: is not valid JSON"),
    "other decoder": (lambda p: (p / "tokenizer.json").write_text("{}"), "tokenizer.json: decoder is None, expected"),
    "no model": (
        lambda p: (p / "tokenizer.json").write_text('{"decoder": {"type": "ByteLevel"}}'),
        "tokenizer.json: is not a tokenizer",
    ),
    "wrong id": (
        _config(added_tokens_decoder={"999": {"content": "<|x|>"}}),
        "tokenizer_config.json: token '<|x|>' is declared as id 999, but it becomes 316",
    ),
    "no id": (
        _config(added_tokens_decoder={"x": {"content": "<|x|>"}}),
        "tokenizer_config.json: 'x' is not a token id",
    ),
    "no content": (_config(added_tokens_decoder={"316": {}}), "tokenizer_config.json: added_tokens_decoder[316] is {}"),
    "tokens are a list": (_config(added_tokens_decoder=[1]), "tokenizer_config.json: added_tokens_decoder is [1]"),
    "eos is a number": (_config(eos_token=5), "tokenizer_config.json: eos_token is 5, expected a token"),
    "extra tokens": (_config(extra_special_tokens="x"), "tokenizer_config.json: extra_special_tokens is 'x'"),
    "template is a number": (_config(chat_template=3), "tokenizer_config.json: chat_template is 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    change, words = REFUSED[case]
    change(write_tokenizer(tmp_path))
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(tmp_path, VOCAB_SIZE)
    assert str(caught.value).startswith(f"{tmp_path}/{words}")


# ---- ids, text, chat -----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, VOCAB_SIZE + 5)))
def test_decode_equals_the_library(ids: list[int]) -> None:
    for skip in (True, False):
        assert tiny_tokenizer().decode(ids, skip_special_tokens=skip) == tiny_tokenizer()._backend.decode(
            ids, skip_special_tokens=skip
        )


@given(st.text())
def test_round_trip(text: str) -> None:
    from unicodedata import normalize

    assert tiny_tokenizer().decode(tiny_tokenizer().encode(text), skip_special_tokens=False) == normalize("NFC", text)


def test_lone_surrogate() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        tiny_tokenizer().encode("a\ud800")


@pytest.mark.parametrize("expression", ["dictsort", "wordwrap(0)"])
def test_a_template_that_fails_on_a_message_refuses_it(expression: str, tmp_path: Path) -> None:
    template = "{{ messages[0].content | " + expression + " }}"
    tokenizer = some(write_tokenizer(tmp_path, chat_template=template))
    with pytest.raises(ValueError, match="the chat template refuses the messages: "):
        tokenizer.render([{"role": "user", "content": "x"}])


def test_byte_order_marks_are_part_of_no_file(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path, chat_template="{{ messages[0].content }}")
    plain = some(path).encode("a cat")
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    for file in path.iterdir():
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    marked = some(path)
    assert marked.encode("a cat") == plain
    assert marked.render([{"role": "user", "content": "x"}]) == "x"


def test_no_chat_template(tmp_path: Path) -> None:
    tokenizer = some(write_tokenizer(tmp_path, chat_template=None))
    assert tokenizer.chat_template is None
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.render([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "no messages"),
        ([{"role": "tool", "content": "x"}], "refuses the messages: unknown role tool"),
        ([{"role": "user"}], "refuses the messages: .*content"),
        ([{"role": "user", "content": [1]}], "refuses the messages: "),
    ],
)
def test_chat_errors(messages: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tiny_tokenizer().render(messages)


def test_broken_template(tmp_path: Path) -> None:
    source = r"tokenizer_config\.json: chat_template: line 1: Expected an expression"
    with pytest.raises(TokenizerError, match=source):
        load_tokenizer(write_tokenizer(tmp_path, chat_template="{% if %}"), VOCAB_SIZE)
    assert load_tokenizer(tmp_path, VOCAB_SIZE, CHAT_TEMPLATE).chat_template == CHAT_TEMPLATE
    with pytest.raises(TokenizerError, match="^chat_template: line 1: Expected an expression"):
        load_tokenizer(tmp_path, VOCAB_SIZE, "{% if %}")
    with pytest.raises(TokenizerError, match="^chat_template: Exceeds the limit"):
        load_tokenizer(tmp_path, VOCAB_SIZE, "{{ " + "1" * 5000 + " }}")


def test_template_with_the_tags_of_transformers(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    tokenizer = some(write_tokenizer(tmp_path, chat_template=template))
    assert tokenizer.render([{"role": "user", "content": "hello"}]) == "hello"


def test_template_sources(tmp_path: Path) -> None:
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": CHAT_TEMPLATE}]
    messages = [{"role": "user", "content": "hello"}]
    write_tokenizer(tmp_path, chat_template=named)
    assert some(tmp_path).render(messages) == tiny_tokenizer().render(messages)
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}")
    assert some(tmp_path).render(messages) == SPECIAL[0]
    assert some(write_tokenizer(tmp_path / "b", chat_template=named[:1])).chat_template is None


@given(st.text())
@example("e\u0301" * 50)
@example("\u1100\u1161\u11a8" * 50)
@example("\u03b1\u0313\u0300\u0345" * 50)
def test_no_text_has_more_characters_than_its_tokens_can_stand_for(text: str):
    tokenizer = tiny_tokenizer()
    assert len(text) <= tokenizer.max_characters(len(tokenizer.encode(text)))


def test_a_text_that_is_far_too_long_is_not_tokenized(monkeypatch: pytest.MonkeyPatch):
    tokenizer = tiny_tokenizer()
    prompts = Prompts(tokenizer, VOCAB_SIZE, VOCAB_SIZE - 1, "m", max_model_len=3)
    longest = tokenizer.max_characters(3)
    assert longest == 3 * 4 * len("<|endoftext|>")
    assert len(prompts.encode("a" * longest)) == longest
    with pytest.raises(ParameterError, match="messages: has 4 messages"):
        prompts.encode_chat([{"role": "user", "content": ""}] * 4)
    monkeypatch.setattr(tokenizer, "encode", None)
    with pytest.raises(ParameterError, match=f"prompt: has {longest + 1} characters"):
        prompts.encode("a" * (longest + 1))
    with pytest.raises(ParameterError, match="messages: has .* characters"):
        prompts.encode_chat([{"role": "user", "content": "a" * longest}])


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"
DOUBLED = "{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set n.x = BODY %}{% endfor %}"
ENDLESS = {
    "loops": LOOP,
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "a recursive loop": "{% for a in range(99999) recursive %}{{ loop(range(99999)) if loop.depth < 5 }}{% endfor %}",
    "filters": LOOP.replace("BODY", "{{ range(9)|map('string')|join }}"),
    "a list that holds another twice": DOUBLED.replace("BODY", "[n.x, n.x]") + "{{ n.x }}",
    "slices": "{{ messages | slice(10**9) | list }}",
    "sums": "{{ ([range(9999) | list] * 9999) | sum(start=[]) }}",
}


@pytest.mark.parametrize("endless", ENDLESS.values(), ids=ENDLESS)
def test_a_chat_template_that_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endless: str):
    template = "{% if messages[0].content == 'x' %}" + endless + "{% endif %}fine"
    tokenizer = some(write_tokenizer(tmp_path, chat_template=template))
    assert tokenizer.render([{"role": "user", "content": "y"}]) == "fine"
    monkeypatch.setattr("lopa_ascend.text.sandbox.TEMPLATE_TIMEOUT", 0.2)
    with pytest.raises(ValueError, match="the chat template takes longer than 0.2 s"):
        tokenizer.render([{"role": "user", "content": "x"}])
    assert tokenizer.render([{"role": "user", "content": "y"}]) == "fine"


@pytest.mark.parametrize(
    "huge",
    [
        DOUBLED.replace("BODY", "n.x ~ n.x"),
        "{{ 'x' * 10 ** 10 }}",
        "{{ '%10000000000d' | format(1) }}",
        "{{ messages[0].content | attr('zfill')(10**11) }}",
        "{{ ['x' * 9999] * 10 ** 8 }}",
        "{{ messages | tojson(indent=10**9) }}",
        "{{ ('x' * 9**7) | replace('x', 'y' * 9**7) }}",
    ],
)
def test_a_chat_template_gets_little_memory(tmp_path: Path, huge: str):
    tokenizer = some(write_tokenizer(tmp_path, chat_template=huge))
    with pytest.raises(ValueError, match="the chat template needs too much memory for the messages"):
        tokenizer.render([{"role": "user", "content": "x"}])


def test_a_chat_template_makes_no_texts_without_end(tmp_path: Path):
    tokenizer = some(write_tokenizer(tmp_path, chat_template="{{ 'x' * (2 ** 24 + 1) }}"))
    with pytest.raises(ValueError, match="the chat template makes more than 16777216 characters of the messages"):
        tokenizer.render([{"role": "user", "content": "x"}])


def test_a_template_that_does_all_of_its_work_when_it_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Jinja evaluates constants then."""
    path = write_tokenizer(tmp_path, chat_template="{{ '%10000000000d' | format(1) }}")
    with pytest.raises(ValueError, match="the chat template needs too much memory"):
        some(path).render([{"role": "user", "content": "x"}])
    monkeypatch.setattr("lopa_ascend.text.sandbox.TEMPLATE_TIMEOUT", 0.3)
    path = write_tokenizer(tmp_path, chat_template="{{ 1.5 | round(10 ** 7, 'ceil') }}")
    with pytest.raises(TokenizerError, match="tokenizer_config.json: chat_template: takes longer than 0.3 s"):
        some(path)


def test_a_template_that_ends_its_process_is_refused(tmp_path: Path):
    tokenizer = some(write_tokenizer(tmp_path, chat_template="{{ messages[0].content }}"))
    assert tokenizer.render([{"role": "user", "content": "x"}]) == "x"
    (process,) = sandbox._idle
    process.kill()
    process.wait()
    assert tokenizer.render([{"role": "user", "content": "a\ud800b"}]) == "a\ud800b"


TEMPLATES = [
    "{% for m in messages %}{{ loop.index0 }}/{{ loop.length }}{{ loop.last }}{{ m['content'] | trim }}{% endfor %}",
    "{% for m in messages[::-1] %}{{ loop.first }}{% if loop.nextitem is defined %}{{ loop.nextitem.role }}{% endif %}"
    "{% else %}-{% endfor %}",
    "{%- set ns = namespace(n=0, s='') -%}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.s = ns.s ~ m.content ~ ns.n %}{% endfor %}\n  {{ ns.s }}\n",
    "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ bos_token }}|{{ eos_token }}{{ tools }}{{ documents }}",
    "{% macro say(m, w=2) %}{{ m.role.upper() + ': ' + m.content * w }}{% endmacro %}"
    "{% for m in messages %}{{ say(m) }}{% endfor %}",
    "{{ messages | map(attribute='content') | join(', ') }}"
    "{{ '%s-%d' % (messages[0].role, 7) }}{{ 7 % 4 }}{{ 2 ** 5 }}",
    "{% if add_generation_prompt %}{{ strftime_now('%Y')[:2] }}{% endif %}{% for m in messages if m.role == 'user' %}"
    "{% generation %}{{ m.content.split('l')[-1] }}{% endgeneration %}{% continue %}{% endfor %}",
    "{% for key, value in messages[0].items() %}{{ key ~ '=' ~ value }};{% endfor %}{% for x in nothing %}{% endfor %}",
    "{{ dict(a=1).a }}{{ '{:>5}'.format(messages[0].content) }}"
    "{% set x %}a{{ 1 }}{% endset %}{{ x }}{{ none ~ 1.5 ~ true }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_render_as_in_transformers(tmp_path: Path, template: str):
    messages = [{"role": "user", "content": " hello <b>"}, {"role": "assistant", "content": "\u00e9 \U0001f642"}]
    ours = some(write_tokenizer(tmp_path, chat_template=template))
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), chat_template=template, **ours.special
    )
    assert ours.render(messages) == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_a_banned_text_may_grow_in_nfc(tmp_path: Path) -> None:
    prompts = Prompts(some(write_tokenizer(tmp_path)), 100, VOCAB_SIZE - 1, "m")
    for character in ("\u0958", "\ufb2c", "\U0001d160"):  # from 3 or 4 bytes to 6 or 12
        params = prompts.for_engine(DecodingParams(bad_words=(character * 64,)))
        assert max(map(len, params.bad_words)) > 4 * 64
