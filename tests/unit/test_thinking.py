"""Models that think before they answer: what they think is told apart, and variables of chat templates."""

import json
import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from lopa_ascend.admission import Limits
from lopa_ascend.config import DecodingParams, ParameterError
from lopa_ascend.decode import begin
from lopa_ascend.decode.constraint import Constraint
from lopa_ascend.decode.strategy import SequenceStart
from lopa_ascend.decode.thinking import FreeAnswer, ThinkingMatcher
from lopa_ascend.serve.api.chat import ChatRequest
from lopa_ascend.serve.api.completions import CompletionRequest
from lopa_ascend.serve.api.decisions import DecisionRequest
from lopa_ascend.serve.api.request import GenerationRequest, Planner
from lopa_ascend.serve.api.responses import ResponseRequest
from lopa_ascend.serve.http.body import read_body
from lopa_ascend.serve.http.encoding import pieces
from lopa_ascend.serve.tokens import TokenizeRequest, _tokenized
from lopa_ascend.text.grammars import Grammars
from lopa_ascend.text.prompt import Prompts
from lopa_ascend.text.reasoning import ReasoningReader
from lopa_ascend.types import DREAM, GenerationOutput, ModelProperties, Progress, RowResult, Thinking, TokenRun, Update
from tests.answers import final_tokens
from tests.tiny import tiny_tokenizer

TEMPLATE = Path(__file__).parents[1] / "thinking.jinja"
HELLO = {"role": "user", "content": "hello"}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add"}}]
FLAT = [{"type": "function", "name": "add"}]
LIMITS = Limits(320, 319, 4096, 1000, 4, 8192, 7)
MARKED = Thinking(False, tuple(tiny_tokenizer().encode("<think>")), tuple(tiny_tokenizer().encode("</think>")))


def planner(template: str | None = None, **defaults: Any) -> Planner:
    tokenizer = tiny_tokenizer.__wrapped__()
    tokenizer.chat_template = TEMPLATE.read_text() if template is None else template
    return Planner(Prompts(tokenizer, 320, 319, "m", template_variables=defaults), LIMITS, {})


PLANNER = planner()


def chat(**fields: Any) -> ChatRequest:
    return read_body(ChatRequest, json.dumps({"messages": [HELLO], "max_tokens": 64, **fields}).encode())


def respond(**fields: Any) -> ResponseRequest:
    return read_body(ResponseRequest, json.dumps({"input": [HELLO], "max_output_tokens": 64, **fields}).encode())


def prompt_of(request: GenerationRequest, plan: Planner = PLANNER) -> str:
    (choice,) = request.plan(plan)
    return tiny_tokenizer().decode(choice.prompt, skip_special_tokens=False)


def test_decisions_are_read_behind_the_closing_mark() -> None:
    body = {"state": "x", "questions": {"q": {"type": "noul", "instructions": "?"}}}
    request = read_body(DecisionRequest, json.dumps(body).encode())
    for plan in (PLANNER, planner("{{ messages[0].content }}<think>{# </think> #}")):
        (choice,) = request.plan(plan)
        assert tiny_tokenizer().decode(choice.prompt, skip_special_tokens=False).rstrip().endswith("</think>")


# ---- variables of the chat template ----------------------------------------------------------------------------------


def test_variables_reach_the_template_from_every_route():
    without = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    fields: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
    tokenized = _tokenized(PLANNER.prompts, TokenizeRequest(messages=chat().messages, **fields), 512)
    ends = [
        prompt_of(chat(**fields)),
        prompt_of(respond(**fields)),
        tiny_tokenizer().decode(tokenized.tokens, skip_special_tokens=False),
    ]
    ends += [prompt_of(chat(), planner(enable_thinking=False)), prompt_of(chat(reasoning_effort="none")) + "x"]
    assert [without in text for text in ends] == [True] * 5
    assert without not in prompt_of(chat(**fields | {"chat_template_kwargs": {"enable_thinking": True}}))
    by_default = planner(enable_thinking=False)
    assert without not in prompt_of(chat(chat_template_kwargs={"enable_thinking": True}), by_default)
    assert prompt_of(respond(reasoning={"effort": "high"})).endswith("<|im_start|>assistant\nhigh")


def test_special_tokens_in_variables_are_text():
    text = prompt_of(chat(chat_template_kwargs={"reasoning_effort": "<|mask|>"}))
    assert "<|mask|>" in text, "as ordinary tokens, or the prompt would be refused"


@pytest.mark.parametrize("name", ["enable_thinkin", "messages", "tools", "add_generation_prompt", "eos_token", "range"])
def test_a_variable_that_the_template_does_not_read_is_refused(name: str):
    expected = rf"^chat_template_kwargs.{name}: is not read by the chat template, which reads enable_thinking, opens, "
    with pytest.raises(ParameterError, match=expected):
        chat(chat_template_kwargs={name: 1}).plan(PLANNER)
    with pytest.raises(ParameterError, match=f"^default_chat_template_kwargs.{name}: "):
        planner(None, **{name: 1})


def test_a_template_that_knows_no_thinking_needs_not_be_told_to_leave_it():
    plain = planner("{{ messages[0].content }}")
    chat(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="high").plan(plain)
    for value in (True, 0):
        with pytest.raises(ParameterError, match="which reads none"):
            chat(chat_template_kwargs={"enable_thinking": value}).plan(plain)


# ---- what the model thinks -------------------------------------------------------------------------------------------

TEXTS = {
    "": ("", ""),
    "  hi": ("", "  hi"),
    "<think>\nabc  def\n</think>\n\nyes <think> `</think>`": ("abc  def", "yes <think> `</think>`"),
    "\n<think>a</think>\n<think>b</think>c": ("a\n\nb", "c"),
    "<think>\nnever ends </thin": ("never ends </thin", ""),
    "<think></think> yes": ("", "yes"),
    "a</think>b": ("", "a</think>b"),
    "`<think>`": ("", "`<think>`"),
    "<thin": ("", "<thin"),
}
OPENED = {
    "\nabc\n</think>\n\nyes": ("abc", "yes"),
    "<think>\nabc</think>yes": ("abc", "yes"),
    "abc <think> def": ("abc <think> def", ""),
    "a</think>\n": ("a", ""),
}


@given(st.sampled_from([*((text, False) for text in TEXTS), *((text, True) for text in OPENED)]), st.randoms())
def test_thoughts_are_told_from_the_answer_wherever_the_text_is_cut(case: tuple[str, bool], rng: random.Random):
    text, is_open = case
    reader, thought = ReasoningReader(Thinking(is_open, (1,), (2,))), ""
    for length in sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6))):
        thought += reader.push(text[:length], is_final=False)
    thought += reader.push(text, is_final=True)
    answer = "" if reader.begin is None else text[reader.begin :]
    assert (thought, answer) == (OPENED if is_open else TEXTS)[text]


def output_of(text: str, reason: str = "stop") -> GenerationOutput:
    ids = tuple(tiny_tokenizer().encode(text))
    return GenerationOutput((1,), TokenRun(ids, (0.5,) * len(ids)), text, reason, None, 3, 9, 9)


def whole(request: GenerationRequest, text: str, reason: str = "stop") -> dict[str, Any]:
    writer = request.writer(PLANNER, "m", request.plan(PLANNER))
    answer: dict[str, Any] = json.loads(b"".join(pieces(writer.whole([output_of(text, reason)]))))
    return answer


def streamed(request: GenerationRequest, text: str, reason: str = "stop") -> list[dict[str, Any]]:
    writer = request.writer(PLANNER, "m", request.plan(PLANNER))
    output, update, events = output_of(text, reason), Update("r", TokenRun(), 1, 1, 9, 0, 0), writer.opening()
    for cut in range(len(output.token_ids)):
        known = output.token_ids[:cut]
        events += writer.events(0, update, Progress(output.tokens[:cut], tiny_tokenizer().decode(known)))
    last = Progress(output.tokens, text, output)
    return [*events, *writer.events(0, update, last), *writer.closing()]


OPENS = {"chat_template_kwargs": {"opens": True}}
ANSWERS = [
    ({}, "<think>\nhm, so\n</think>\n\nyes", "stop", "hm, so", "yes", []),
    (OPENS, "hm, so\n</think>\n\nyes", "stop", "hm, so", "yes", []),
    (OPENS, "hm, so", "length", "hm, so", "", []),
    ({"tools": TOOLS}, f"<think>\nI {CALLED}\n</think>\n\n{CALLED}", "tool_calls", f"I {CALLED}", None, ["add"]),
    ({"tools": TOOLS}, "yes", "stop", None, "yes", []),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "<think>a</think>b", "stop", None, "<think>a</think>b", []),
    ({"include_reasoning": False}, "<think>a</think>b", "stop", None, "b", []),
    ({"separate_reasoning": False}, "<think>a</think>b", "stop", None, "<think>a</think>b", []),
    ({"logprobs": True, "return_token_ids": True}, "<think>a</think>b", "stop", "a", "b", []),
]


@pytest.mark.parametrize(("fields", "text", "reason", "thought", "answer", "calls"), ANSWERS)
def test_chat_has_reasoning_content(
    fields: dict[str, Any], text: str, reason: str, thought: str | None, answer: str | None, calls: list[str]
):
    reply = whole(chat(**fields), text, "length" if reason == "length" else "stop")
    (choice,) = reply["choices"]
    message = choice["message"]
    assert (choice["finish_reason"], message.get("reasoning_content"), message["content"]) == (reason, thought, answer)
    assert [call["function"]["name"] for call in message.get("tool_calls", [])] == calls
    state, asked = ChatCompletionStreamState(), chat(**fields, stream=True, stream_options={"include_usage": True})
    chunks = streamed(asked, text, "length" if reason == "length" else "stop")
    for chunk in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    built = state.current_completion_snapshot
    assert built.usage is not None
    assert built.usage.model_dump(exclude_none=True) == reply["usage"]
    assert (built.choices[0].message.content or None) == (answer or None)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == (thought or "")
    if "logprobs" in fields:
        parts = [choice for chunk in chunks for choice in chunk["choices"]]
        assert [token for part in parts for token in part.get("token_ids", [])] == tiny_tokenizer().encode(text)
        logprobs = [token for part in parts for token in (part["logprobs"] or {"content": []})["content"]]
        assert len(logprobs) == len(tiny_tokenizer().encode(text))


def test_reasoning_tokens_are_those_up_to_the_closing_mark():
    text = "<think>hm</think>yes"
    usage = whole(chat(), text)["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(tiny_tokenizer().encode(text[:-3]))
    assert whole(chat(), "yes")["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert whole(respond(**OPENS), "hm", "length")["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


@cache
def event_type() -> TypeAdapter[Any]:
    return TypeAdapter(ResponseStreamEvent)


@pytest.mark.parametrize(
    ("fields", "text", "kinds"),
    [
        ({}, "<think>\nhm\n</think>\n\nyes", ["reasoning", "message"]),
        (
            {"tools": [{"type": "function", "name": "add"}]},
            f"<think>hm</think>{CALLED}",
            ["reasoning", "function_call"],
        ),
        (OPENS, "hm", ["reasoning"]),
        ({}, "yes", ["message"]),
        (OPENS, "</think>yes", ["message"]),
    ],
)
def test_a_response_has_an_item_for_what_the_model_thought(fields: dict[str, Any], text: str, kinds: list[str]):
    reason = "length" if text == "hm" else "stop"
    reply = Response.model_validate(whole(respond(**fields), text, reason))
    assert [item.type for item in reply.output] == kinds
    events = [event_type().validate_python(event) for event in streamed(respond(**fields), text, reason)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == ("response.incomplete" if reason == "length" else "response.completed")
    assert [item.type for item in last.response.output] == kinds
    if kinds[0] != "reasoning":
        return
    item: Any = reply.output[0]
    assert ([part.text for part in item.content], item.summary) == (["hm"], [])
    assert item.status == ("incomplete" if reason == "length" else "completed")
    first = [event for event in events if getattr(event, "output_index", None) == 0]
    assert "".join(event.delta for event in first if event.type == "response.reasoning_text.delta") == "hm"
    order = [event.type.removeprefix("response.") for event in first if not event.type.endswith(".delta")]
    closed = ["reasoning_text.done", "content_part.done", "output_item.done"]
    assert order == ["output_item.added", "content_part.added", *closed]
    others = [event.sequence_number for event in events if getattr(event, "output_index", 0) == 1]
    assert all(number > first[-1].sequence_number for number in others), "what was thought is closed first"


def test_earlier_reasoning_is_sent_back():
    earlier = {"role": "assistant", "content": "yes"}
    text = prompt_of(chat(messages=[HELLO, {**earlier, "reasoning_content": "hm"}, HELLO]))
    assert "<think>\nhm\n</think>\n\nyes" in text
    assert prompt_of(chat(messages=[HELLO, {**earlier, "reasoning": "hm"}, HELLO])) == text
    item = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    assert prompt_of(respond(input=[HELLO, item, earlier, HELLO])) == text
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    called = prompt_of(respond(input=[HELLO, item, call, HELLO]))
    assert '<think>\nhm\n</think>\n\n\n<tool_call>\n{"name": "add"' in called
    bare = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    assert "<think>" not in prompt_of(respond(input=[HELLO, bare, earlier, item, HELLO]))


# ---- answers in a form -----------------------------------------------------------------------------------------------

WORD = "(yes|no)"


def matcher(thinking: Thinking) -> ThinkingMatcher:
    grammar = DecodingParams.of(structured_outputs={"regex": WORD}).structured_outputs
    assert grammar is not None
    return ThinkingMatcher(Grammars(tiny_tokenizer()).matcher(grammar), thinking, 320)


ENCODED = tiny_tokenizer().encode
OPEN, CLOSE = ENCODED("x")[0], ENCODED("z")[0]


@pytest.mark.parametrize(
    ("thinking", "fits", "misfits"),
    [
        (Thinking(True, (OPEN,), (CLOSE,)), "abcz|yes", "abczx"),
        (Thinking(True, (OPEN,), (CLOSE,), 2), "abz|no", "abc"),
        (Thinking(True, (OPEN,), (CLOSE,), 0), "z|no", "a"),
        (Thinking(False, (OPEN,), (CLOSE,)), "xaz|no", "a"),
        (Thinking(False, (OPEN,), (CLOSE,), 1), "xaz|no", "xab"),
        (Thinking(False, (OPEN,), (CLOSE,)), "|yes", "q"),
        (Thinking(True, (OPEN,), (CLOSE, OPEN), 1), "azx|no", "azy"),
        (Thinking(False, (OPEN, OPEN), (CLOSE,)), "|yes", "x"),
    ],
)
def test_a_grammar_begins_after_the_thoughts(thinking: Thinking, fits: str, misfits: str):
    thoughts, _, answer = fits.rpartition("|")
    tokens, found = [token for text in (*thoughts, answer) for token in ENCODED(text)], matcher(thinking)
    rng = random.Random(fits)
    for _ in range(20):
        found.roll_back(found.accept(tokens) - (keep := rng.randrange(len(tokens))))
        for position in range(keep, len(tokens)):
            assert not found.is_complete
            assert not found.is_over
            assert found.allowed() >> tokens[position] & 1
            assert list(found.forced())[:1] in ([], [tokens[position]])
            assert found.accept([tokens[position]]) == 1
        assert found.is_complete
        found.roll_back(len(tokens))
    wrong = [token for letter in misfits for token in ENCODED(letter)]
    assert found.accept(wrong) == len(wrong) - 1
    assert not found.allowed() >> wrong[-1] & 1


@pytest.mark.parametrize(
    "options",
    [
        {"decoding": "d2f"},
        {"num_branches": 3, "branch_acceptance": "exact"},
        {"decoding": "parallel"},
        {"base": "fast_dllm"},
    ],
)
@pytest.mark.parametrize("is_open", [True, False])
def test_decodings_think_as_long_as_they_may_and_answer_then(options: dict[str, Any], is_open: bool):
    rng, end = random.Random(3), 316
    params = DecodingParams.of(max_new_tokens=64, block_size=8, structured_outputs={"regex": WORD}, **options)
    constraint = Constraint(matcher(Thinking(is_open, (OPEN,), (CLOSE,), 10)), [end])
    strategy = begin(SequenceStart((1, 2), params, 319, frozenset([end]), properties=DREAM, constraint=constraint))
    thinks = [OPEN, *ENCODED("abcdefgh")]
    while (plan := strategy.plan()) is not None:
        results = []
        for row in plan.rows:
            tokens = [OPEN if position == 2 and not is_open else rng.choice(thinks) for position in row.masked]
            if row.masked:
                allowed = strategy.grammar.allowed(strategy.anchor, row)
                fitting = [token for token in range(320) if allowed >> token & 1]
                tokens[0] = tokens[0] if tokens[0] in fitting else fitting[0]
            probs = tuple(rng.random() for _ in tokens)
            results.append(RowResult(tuple(tokens), probs, probs))
        strategy.absorb(plan, results, 0, 0)
    answer = final_tokens(strategy)[not is_open :]
    assert answer.index(CLOSE) == 10
    assert tiny_tokenizer().decode(answer[11:]) in ("yes", "no")


CAUSAL = ModelProperties(logit_shift=0, attention="causal")


def decoded(
    limit: int, predicted: Mapping[int, tuple[int, float]], **options: Any
) -> tuple[list[int], list[list[int]]]:
    """The answer to a prompt of two tokens after predictions by place, elsewhere "a" with a probability of 0.4; and the
    generated tokens of each pass as it computes them."""
    params = DecodingParams.of(**{"decoding": "causal_blocks", "block_size": 8, "max_new_tokens": 16, **options})
    answer = FreeAnswer((CLOSE,), 320)
    constraint = Constraint(ThinkingMatcher(answer, Thinking(True, (), (CLOSE,), limit), 320), [316])
    strategy = begin(SequenceStart((1, 2), params, 319, frozenset([316]), properties=CAUSAL, constraint=constraint))
    computed = []
    while (plan := strategy.plan()) is not None:
        results = []
        for row in plan.rows:
            tokens, probs = zip(*(predicted.get(place - 2, (A, 0.4)) for place in row.masked), strict=True)
            allowed = strategy.grammar.allowed(strategy.anchor, row)
            first = tokens[0] if allowed >> tokens[0] & 1 else CLOSE if allowed == 1 << CLOSE else A
            results.append(RowResult((first, *tokens[1:]), probs, probs))
        computed.append(list(plan.rows[-1].tokens[max(0, 2 - plan.rows[-1].start) :]))
        strategy.absorb(plan, results, 0, 0)
    return final_tokens(strategy), computed


A = ENCODED("a")[0]


@pytest.mark.parametrize("options", [{}, {"decoding": "lopa", "base": "causal_blocks", "num_branches": 2}])
def test_causal_blocks_see_from_the_beginning_where_thoughts_must_end(options: dict[str, Any]):
    answer, computed = decoded(5, {}, **options)
    assert computed[1][5] == CLOSE
    assert answer == [A, A, A, A, A, CLOSE, *[A] * 10]
    at_the_start, _ = decoded(8, {}, **options)
    assert at_the_start.index(CLOSE) == 8
    early, computed = decoded(5, {2: (CLOSE, 0.9)}, **options)  # the thoughts end before: what was given goes
    assert computed[1][5] == CLOSE
    assert early == [A, A, CLOSE, *[A] * 13]


def test_thoughts_are_filled_in_the_order_of_a_free_answer():
    """A limit that is not reached changes nothing; only a grammar that says what comes next fills the first mask."""
    rng = random.Random(0)
    predicted = {place: (rng.choice(ENCODED("abcdef")), rng.random()) for place in range(16)}
    limited, computed = decoded(99, predicted, tau_conf=0.8)
    params = DecodingParams.of(decoding="causal_blocks", block_size=8, max_new_tokens=16, tau_conf=0.8)
    strategy = begin(SequenceStart((1, 2), params, 319, frozenset([316]), properties=CAUSAL))
    for tokens in computed:
        plan = strategy.plan()
        assert plan is not None
        (row,) = plan.rows
        assert list(row.tokens[max(0, 2 - row.start) :]) == tokens
        tokens_, probs = zip(*(predicted[place - 2] for place in row.masked), strict=True)
        strategy.absorb(plan, [RowResult(tokens_, probs, probs)], 0, 0)
    assert strategy.plan() is None
    assert final_tokens(strategy) == limited


def test_the_engine_is_told_how_the_model_thinks():
    def thinking_of(request: GenerationRequest, plan: Planner = PLANNER) -> Any:
        grammar = request.plan(plan)[0].params.structured_outputs
        return grammar and (grammar.thinking, grammar.kind)

    form = {"response_format": {"type": "json_object"}}
    assert thinking_of(chat(**form)) == (MARKED, "json_object")
    opened = Thinking(True, MARKED.open, MARKED.close, 9)
    assert thinking_of(chat(**form, **OPENS, max_thinking_tokens=9)) == (opened, "json_object")
    assert thinking_of(respond(**OPENS, thinking_token_budget=9)) == (opened, "any")
    assert thinking_of(chat(**form, chat_template_kwargs={"enable_thinking": False})) == (None, "json_object")
    assert thinking_of(chat(chat_template_kwargs={"enable_thinking": False}, max_thinking_tokens=9)) is None
    assert thinking_of(chat()) is None
    plain = planner("{{ messages[0].content }}")
    assert thinking_of(chat(**form), plain) == (None, "json_object")
    with pytest.raises(ParameterError, match="^max_thinking_tokens: the chat template of this model has no <think>"):
        chat(max_thinking_tokens=9).plan(plain)
    completion = read_body(CompletionRequest, b'{"prompt": "a", "max_tokens": 4, "max_thinking_tokens": 9}')
    with pytest.raises(ParameterError, match="^max_thinking_tokens: this is no conversation"):
        completion.plan(PLANNER)
    with pytest.raises(ParameterError, match='^max_thinking_tokens: 9 does not go with decoding "vanilla"'):
        chat(max_thinking_tokens=9, decoding="vanilla").plan(PLANNER)
    default = Planner(PLANNER.prompts, LIMITS, {"max_thinking_tokens": 9})
    assert thinking_of(chat(**OPENS), default) == (opened, "any")
    assert thinking_of(read_body(CompletionRequest, b'{"prompt": "a", "max_tokens": 4}'), default) is None
