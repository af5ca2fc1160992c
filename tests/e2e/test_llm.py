"""The Python API: what users call, with a tiny random model."""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import lopa_ascend
from lopa_ascend import LLM, DecodingParams
from lopa_ascend.checkpoint import CheckpointError
from lopa_ascend.config import ConfigError, ParameterError
from lopa_ascend.llm import GenerationError
from lopa_ascend.parallel.collectives import RankError
from lopa_ascend.text.tokenizer import TokenizerError
from tests.tiers import slow_but
from tests.tiny import VOCAB_SIZE, write_dream, write_tokenizer

SHORT = {"block_size": 8, "max_new_tokens": 40, "tau_conf": 0.5}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_dream(folder, eos_token_id=3)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def llm(path) -> LLM:
    return LLM(path, enable_prefix_caching=False)


def params(**kwargs) -> DecodingParams:
    return DecodingParams(**{**SHORT, **kwargs})


def one(llm: LLM, prompt="hello the answer", **kwargs):
    return llm.generate(prompt, params(**kwargs), quiet=True)[0]


def test_prompts_as_text_texts_and_token_ids(llm: LLM) -> None:
    text = one(llm)
    ids = llm.tokenizer.encode("hello the answer")
    assert llm.generate(["hello the answer", "ing"], params(), quiet=True)[0] == text
    assert llm.generate([ids], params(), quiet=True)[0] == text
    assert text.prompt_token_ids == tuple(ids)
    assert text.text == llm.tokenizer.decode(list(text.token_ids))


def test_a_process_without_stderr(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)  # it was closed when Python started
    assert llm.generate(["hello"], params()) == [one(llm, "hello")]


def test_a_directory_recommends_how_its_model_is_decoded(tmp_path: Path) -> None:
    write_dream(tmp_path, eos_token_id=3)
    write_tokenizer(tmp_path)
    recommended = {"eos_token_id": 3, "lopa_ascend": {"block_size": 8, "num_branches": 2, "max_new_tokens": 24}}
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended))
    llm = LLM(tmp_path, enable_prefix_caching=False)
    assert llm.params() == DecodingParams(block_size=8, num_branches=2, max_new_tokens=24)
    assert llm.params(decoding="d2f", tau_conf=0.5) == params(decoding="d2f", max_new_tokens=24)
    messages = [{"role": "user", "content": "hello"}]
    assert llm.generate("hello", quiet=True) == llm.generate("hello", llm.params(), quiet=True)
    assert llm.chat(messages, quiet=True) == llm.chat(messages, llm.params(), quiet=True)
    assert llm.generate("hello", quiet=True) != llm.generate("hello", DecodingParams(), quiet=True)
    with pytest.raises(ParameterError, match="block_sizes: unknown option; choose from .*block_size"):
        llm.params(block_sizes=8)


def test_an_adapter_answers_as_the_checkpoint_does_into_which_it_was_merged(tmp_path: Path) -> None:
    base, merged = (write_dream(tmp_path / name, eos_token_id=3) for name in ("base", "merged"))
    (tmp_path / "adapter").mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    weights, generator = load_file(merged / "model.safetensors"), torch.Generator().manual_seed(0)
    factors: dict[str, Tensor] = {}
    for layer, name in product(range(2), ("q_proj", "v_proj")):
        module = f"model.layers.{layer}.self_attn.{name}"
        weight = weights[f"{module}.weight"]
        shapes = (2, weight.shape[1]), (weight.shape[0], 2)
        a, b = (torch.randint(-4, 5, shape, generator=generator) / 8 for shape in shapes)
        weight += 2 * b @ a  # exact, so both are rounded once
        factors |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
    save_file(weights, merged / "model.safetensors")
    save_file(factors, tmp_path / "adapter" / "adapter_model.safetensors")
    plain, adapted, expected = (
        LLM(path, lora=lora).generate([[5, 6, 7]], params(ignore_eos=True), trace=True, quiet=True)[0]
        for path, lora in ((base, None), (base, tmp_path / "adapter"), (merged, None))
    )
    assert adapted == expected
    assert adapted.token_ids != plain.token_ids


def test_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    output = llm.chat([messages, messages], params(), quiet=True)
    assert output[0] == output[1]
    assert list(output[0].prompt_token_ids) == llm.tokenizer.encode(llm.tokenizer.render(messages))


def test_one_prompt_or_conversation_needs_no_list(llm: LLM) -> None:
    ids, messages = llm.tokenizer.encode("hello the answer"), [{"role": "user", "content": "hello"}]
    assert llm.generate(ids, params(), quiet=True) == llm.generate([ids], params(), quiet=True)
    assert llm.chat(messages, params(), quiet=True) == llm.chat([messages], params(), quiet=True)
    assert [*llm.stream("hello the answer", params())][-1].output == one(llm)
    assert [*llm.stream("hello")][-1].output == llm.generate("hello", quiet=True)[0]


@pytest.mark.parametrize("wrong", [5, None, [5.5], [["a"]], [[]], [True]])
def test_wrong_prompts_are_named(llm: LLM, wrong: object) -> None:
    with pytest.raises(ParameterError, match="^prompt"):
        llm.generate(wrong, params(), quiet=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["hello", [], [[]], {"role": "user", "content": "x"}, [["a"]], [5]])
def test_wrong_conversations_are_named(llm: LLM, wrong: object) -> None:
    with pytest.raises(ParameterError, match="^conversations: must be a list of messages"):
        llm.chat(wrong, params(), quiet=True)  # type: ignore[arg-type]


def test_max_new_tokens_is_exact(llm: LLM) -> None:
    for n in (1, 7, 8, 9, 21):
        output = one(llm, max_new_tokens=n, ignore_eos=True)
        assert len(output.token_ids) == n
        assert output.finish_reason == "length"


@pytest.mark.parametrize("seed", slow_but(range(8), range(3)))
def test_an_answer_of_d2f_in_whole_blocks_is_a_prefix_of_a_longer_one(llm: LLM, seed: int) -> None:
    rng = random.Random(seed)
    block_size = rng.choice([4, 8, 32])
    fields = {
        "decoding": "d2f",
        "block_size": block_size,
        "tau_conf": rng.choice([0.02, 0.05, 0.5]),
        "tau_add": rng.choice([0.1, 0.5]),
        "max_active_blocks": rng.choice([None, 2]),
        "ignore_eos": rng.random() < 0.5,
    }
    prompt = [rng.randrange(4, 200) for _ in range(rng.choice([1, 20, 128]))]
    longest = one(llm, [prompt], max_new_tokens=64, **fields)
    for length in range(block_size, 64, block_size):
        output = one(llm, [prompt], max_new_tokens=length, **fields)
        assert output.token_ids == longest.token_ids[:length]
        assert len(output.token_ids) == min(length, len(longest.token_ids))


def test_min_new_tokens_holds_eos_back(llm: LLM) -> None:
    eos = one(llm, ignore_eos=True).token_ids[5]
    assert len(one(llm, eos_token_id=eos).token_ids) <= 5
    output = one(llm, eos_token_id=eos, min_new_tokens=20)
    assert len(output.token_ids) >= 20
    assert eos not in output.token_ids


def test_eos_ends_the_text_and_is_cut_off(llm: LLM) -> None:
    eos = one(llm, ignore_eos=True, decoding="d2f").token_ids[12]
    output = one(llm, eos_token_id=(eos, 5), decoding="d2f")
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert eos not in output.token_ids
    # A stop token ends the text at the same place and is the reason, also where EOS are ignored.
    stopped = one(llm, eos_token_id=(), stop_token_ids=(eos, 5), decoding="d2f")
    assert (stopped.finish_reason, stopped.stop_reason, stopped.token_ids) == ("stop", eos, output.token_ids)
    assert one(llm, eos_token_id=5, stop_token_ids=eos, decoding="d2f", ignore_eos=True) == stopped
    assert eos not in one(llm, stop_token_ids=eos, min_new_tokens=20, decoding="d2f").token_ids


def test_no_eos_at_all_is_not_the_models_own(llm: LLM, tmp_path) -> None:
    """``eos_token_id=()`` is a choice, None is not."""
    produced = one(llm, ignore_eos=True).token_ids[5]
    write_dream(tmp_path, eos_token_id=produced)
    write_tokenizer(tmp_path)
    ending = LLM(tmp_path, enable_prefix_caching=False)
    assert one(ending).finish_reason == "stop"
    assert len(one(ending, eos_token_id=()).token_ids) == 40


def test_stop_strings_cut_the_text(llm: LLM) -> None:
    whole = one(llm, ignore_eos=True).text
    stop = whole[len(whole) // 2 :][:3]
    output = one(llm, ignore_eos=True, stop=(stop,))
    assert output.text == whole[: whole.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.num_forwards <= one(llm, ignore_eos=True).num_forwards


def test_a_stop_string_that_is_a_special_token_is_a_stop_token(llm: LLM) -> None:
    token = llm.tokenizer.special_id_of("<|im_end|>")
    for stop in ({"stop": ("<|im_end|>",)}, {"stop_token_ids": (token,)}):
        output = one(llm, eos_token_id=(), logit_bias={token: 100}, **stop)
        assert (output.finish_reason, output.stop_reason) == ("stop", token)


def test_progress_only_ever_grows(llm: LLM) -> None:
    tokens: tuple[int, ...] = ()
    text = ""
    *steps, last = llm.stream(llm.tokenize("hello"), params(ignore_eos=True))
    for step in [*steps, last]:
        assert step.token_ids[: len(tokens)] == tokens
        assert step.text.startswith(text)
        tokens, text = step.token_ids, step.text
    assert last.output.text == text
    assert all(step.output is None for step in steps)


def test_a_closed_stream_gives_its_pages_back(llm: LLM) -> None:
    stream = llm.stream(llm.tokenize("hello"), params())
    next(stream)
    assert llm.engine.stats().pages_in_use
    stream.close()
    assert not llm.engine.stats().pages_in_use
    assert not llm.engine.has_work()


def test_a_seed_reproduces_a_sample_and_another_changes_it(llm: LLM) -> None:
    first = one(llm, temperature=1.0, seed=1, ignore_eos=True)
    assert one(llm, temperature=1.0, seed=1, ignore_eos=True) == first
    assert one(llm, temperature=1.0, seed=2, ignore_eos=True).token_ids != first.token_ids
    assert one(llm, temperature=1.0, ignore_eos=True, top_k=5, top_p=0.9).token_ids


def test_a_bias_forces_and_forbids_tokens(llm: LLM) -> None:
    plain = one(llm, ignore_eos=True).token_ids
    assert set(one(llm, ignore_eos=True, logit_bias={17: 100}).token_ids) == {17}
    assert plain[0] not in one(llm, ignore_eos=True, logit_bias={plain[0]: -100}).token_ids


def test_penalties_count_what_is_committed(llm: LLM) -> None:
    """A biased token fills the first block, until a penalty that grows with its count outweighs the bias."""
    fields = {"ignore_eos": True, "logit_bias": {17: 20}, "block_size": 8, "tau_add": 1.0, "decoding": "d2f"}
    assert set(one(llm, **fields).token_ids) == {17}
    output = one(llm, frequency_penalty=2, **fields)
    assert set(output.token_ids[:8]) == {17}
    assert 17 not in output.token_ids[32:]
    assert one(llm, repetition_penalty=30, **fields).token_ids != one(llm, **fields).token_ids


def writable_head(llm: LLM) -> Tensor:
    """The weights of the LM head, unpacked, because packed weights cannot be changed."""
    model = llm.engine.runner.model
    head: Tensor = model.head.to_dense() if model.head.is_mkldnn else model.head
    model.head = head
    return head


@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_ids_behind_the_tokenizer_and_the_mask_are_never_produced(path, tmp_path, temperature: float) -> None:
    """A head that wants nothing but the mask and ids that the tokenizer lacks."""
    write_dream(tmp_path, vocab_size=VOCAB_SIZE + 60, mask_token_id=VOCAB_SIZE - 1)
    write_tokenizer(tmp_path)
    llm = LLM(tmp_path, enable_prefix_caching=False)
    writable_head(llm)[VOCAB_SIZE - 1 :] *= 20
    for seed in range(3):
        output = one(llm, temperature=temperature, seed=seed, ignore_eos=True)
        assert max(output.token_ids) < VOCAB_SIZE - 1


def test_logits_that_are_not_finite_fail_the_request_alone(path) -> None:
    llm = LLM(path, enable_prefix_caching=False)
    head = writable_head(llm)
    good = one(llm)
    kept = head.clone()
    head[7] = torch.nan
    with pytest.raises(GenerationError, match="not finite"):
        one(llm)
    head.copy_(kept)
    assert not llm.engine.stats().pages_in_use
    assert one(llm) == good


def test_what_the_caller_can_mend_is_a_value_error_and_what_the_engine_suffers_is_none() -> None:
    mended = (ParameterError, CheckpointError, ConfigError, TokenizerError)
    assert all(issubclass(error, ValueError) for error in mended)
    assert not any(issubclass(error, ValueError) for error in (GenerationError, RankError))
    for error in (ParameterError, GenerationError, RankError):
        assert getattr(lopa_ascend, error.__name__) is error


def test_without_a_tokenizer_prompts_are_ids(tmp_path) -> None:
    write_dream(tmp_path)
    llm = LLM(tmp_path, enable_prefix_caching=False)
    output = llm.generate([[1, 2, 3]], params(ignore_eos=True), quiet=True)[0]
    assert output.text is None
    assert len(output.token_ids) == 40
    with pytest.raises(ParameterError, match="prompt.*no tokenizer"):
        llm.generate("text", quiet=True)
    with pytest.raises(ParameterError, match="stop.*tokenizer"):
        llm.generate([[1]], params(stop=("a",)), quiet=True)
    with pytest.raises(ParameterError, match="messages"):
        llm.chat([[{"role": "user", "content": "hello"}]], quiet=True)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [([], "empty"), ([-1], "-1"), ([VOCAB_SIZE], str(VOCAB_SIZE)), ([True], "True"), ([VOCAB_SIZE - 1], "mask")],
)
def test_a_bad_prompt_is_refused_by_name(llm: LLM, prompt: list[int], words: str) -> None:
    with pytest.raises(ParameterError, match=f"prompt.*{words}"):
        llm.generate([prompt], params(), quiet=True)


@pytest.mark.parametrize("decoding", ["lopa", "parallel", "vanilla"])
@pytest.mark.parametrize("name", ["eos_token_id", "stop_token_ids"])
def test_a_mask_that_ends_answers_is_refused(llm: LLM, decoding: str, name: str) -> None:
    mask = llm.config.mask_token_id
    branches = {} if decoding == "lopa" else {"num_branches": 0}
    chosen = params(decoding=decoding, **branches, **{name: (5, mask)})
    with pytest.raises(ParameterError, match=f"{name}: {mask} is the mask"):
        llm.generate("hello", chosen, quiet=True)


def test_a_bias_of_the_mask_is_refused(llm: LLM) -> None:
    """It would take its share from every probability."""
    mask = llm.config.mask_token_id
    with pytest.raises(ParameterError, match=f"logit_bias: {mask} is the mask"):
        llm.generate("hello", params(logit_bias={mask: 100}), quiet=True)


def test_by_default_one_request_with_all_branches_fits(path) -> None:
    """Even if no other request runs beside it."""
    limits = LLM(path, max_num_seqs=1, max_model_len=512).engine.limits
    limits.check(100, params(num_branches=limits.max_num_branches, max_new_tokens=412))


def test_a_request_that_cannot_fit_is_refused_with_the_numbers(path) -> None:
    llm = LLM(path, max_model_len=64)
    with pytest.raises(ParameterError, match="max_new_tokens.*60.*5 tokens.*64.*59"):
        llm.generate([[1] * 5], params(max_new_tokens=60), quiet=True)
    with pytest.raises(ParameterError, match="max_model_len"):
        LLM(path, max_model_len=10**6)
    small = LLM(path, kv_cache_memory=10**6, max_num_branches=255)
    with pytest.raises(ParameterError, match="num_branches.*256 branches.*256 KV pages, but this server has 30"):
        small.generate([[1]], params(num_branches=255), quiet=True)
    few = LLM(path, kv_cache_memory=70_000)
    with pytest.raises(ParameterError, match="max_new_tokens: 1 branches of 300 .*KV pages, but this server has 2"):
        few.generate([[1] * 300], params(decoding="d2f", num_branches=0), quiet=True)
    with pytest.raises(ParameterError, match="num_branches.*16.*max_num_branches 15"):
        llm.generate([[1]], params(num_branches=16), quiet=True)
    with pytest.raises(ParameterError, match="max_seqs: unknown option; choose from.*max_num_seqs"):
        LLM(path, max_seqs=3)


def test_bfloat16(path) -> None:
    llm = LLM(path, dtype="bfloat16")
    assert llm.engine.runner.model.head.dtype == torch.bfloat16
    assert len(one(llm, ignore_eos=True).token_ids) == 40


def test_counts(llm: LLM) -> None:
    output = llm.generate("hello", params(ignore_eos=True), trace=True, quiet=True)[0]
    assert output.trace is not None
    assert output.num_forwards == len(output.trace)
    assert output.tokens_per_forward == 40 / output.num_forwards
    assert output.published_tokens_per_step == 40 / (output.num_forwards + 1)
    assert output.model_tokens == sum(record.model_tokens for record in output.trace)


@pytest.mark.parametrize("base", ["d2f", "parallel"])
def test_the_prompt_is_no_part_of_the_positions_of_the_answer(llm: LLM, base: str) -> None:
    output = llm.generate("hello", params(ignore_eos=True, base=base), trace=True, quiet=True)[0]
    assert output.trace is not None
    assert len(output.trace) > 2
    prompt = len(output.prompt_token_ids)
    for record in output.trace:
        committed = max(0, record.cache_length - prompt)
        longest = max(branch.end for branch in record.branches) - prompt
        assert 0 < record.canvas_positions(prompt) <= len(record.branches) * (longest - committed)
    if base == "parallel":
        assert {record.canvas_positions(prompt) // len(record.branches) for record in output.trace} == {40}


def test_branches_that_are_equal_by_construction_are_computed_once(llm: LLM) -> None:
    causal, full = (
        llm.generate("hello", params(ignore_eos=True, window_attention=mode), trace=True, quiet=True)[0]
        for mode in ("block_causal", "full")
    )
    whole = [sum(branch.end - r.span[0] for branch in r.branches) for r in full.trace]
    assert [record.model_tokens for record in full.trace] == whole
    windows = [branch.end - r.span[0] for r in causal.trace for branch in r.branches]
    assert causal.model_tokens < sum(windows)
