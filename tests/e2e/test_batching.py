"""Many requests in one step: nobody's tokens depend on the neighbours, and an equal prompt is computed once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.config import EngineConfig, ParameterError
from lopa_ascend.core import Request
from lopa_ascend.engine.engine import Engine
from lopa_ascend.text.output_stream import OutputStream
from tests.e2e.batching import decisions, run
from tests.tiers import slow_but
from tests.tiny import write_dream, write_tokenizer

EOS = 3


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_dream(folder, eos_token_id=EOS, hidden=64, heads=4, kv_heads=2)
    write_tokenizer(folder)
    return str(folder)


def requests(seed: int, count: int) -> list[tuple[list[int], DecodingParams]]:
    """Prompts of all lengths, with settings of all kinds side by side."""
    rng = random.Random(seed)
    out = []
    for index in range(count):
        prompt = [rng.randrange(4, 200) for _ in range(rng.choice([1, 20, 127, 128, 200]))]
        params = DecodingParams(
            num_branches=rng.choice([0, 1, 3, 5]),
            block_size=rng.choice([4, 8, 32]),
            max_new_tokens=rng.choice([1, 9, 40, 64]),
            tau_conf=rng.choice([0.3, 0.6, 0.9]),
            tau_add=rng.choice([0.1, 0.5]),
            temperature=rng.choice([0.0, 0.0, 1.0]),
            seed=rng.randrange(100),
            window_attention=rng.choice(["block_causal", "full"]),
            confidence=rng.choice(["max_prob", "margin", "neg_entropy"]),
            branch_score=rng.choice(["mean", "tail"]),
            max_active_blocks=rng.choice([None, 2]),
            ignore_eos=rng.random() < 0.3,
            presence_penalty=1.5 if index % 4 == 2 else 0.0,
            repetition_penalty=1.3 if index % 5 == 3 else 1.0,
            logit_bias=((7, 4.0), (8, -100.0)) if index % 4 == 3 else (),
            min_p=0.1 if index % 2 else 0.0,
        )
        out.append((prompt, params))
    return out


@pytest.mark.parametrize(("seed", "threads"), slow_but([(0, 1), (1, 2), (2, 2)], [(1, 2)]), indirect=["threads"])
def test_tokens_are_the_same_alone_and_among_sixteen_others(path: str, seed: int, threads: int) -> None:
    asked = requests(seed, 17)
    engine = Engine(EngineConfig(model=path, enable_prefix_caching=False))
    alone = [decisions(run(engine, [one])[0]) for one in asked]
    together = [decisions(output) for output in run(engine, asked)]
    assert together == alone
    rng = random.Random(seed)
    arrivals = [rng.randrange(12) for _ in asked]
    narrow = Engine(EngineConfig(model=path, enable_prefix_caching=False, max_num_seqs=5, max_num_batched_tokens=400))
    order = list(range(len(asked)))
    rng.shuffle(order)
    shuffled = run(narrow, [asked[i] for i in order], arrivals)
    assert [decisions(output) for output in shuffled] == [alone[i] for i in order]
    assert not narrow.stats().pages_in_use


@pytest.mark.parametrize(
    ("length", "window"),
    slow_but(
        itertools.product((5, 128, 150, 300), ("block_causal", "full")),
        [(5, "full"), (128, "block_causal"), (300, "full")],
    ),
)
def test_an_equal_prompt_is_not_computed_again(path: str, window: str, length: int) -> None:
    prompt = [4 + i % 190 for i in range(length)]
    params = DecodingParams(num_branches=3, block_size=8, max_new_tokens=40, tau_conf=0.5, window_attention=window)
    engine = Engine(EngineConfig(model=path))
    first = run(engine, [(prompt, params)])[0]
    asked = [(prompt, params), (prompt, replace(params, num_branches=1)), (prompt, replace(params, tau_conf=0.9))]
    again = run(engine, asked, [0, 1, 1])
    assert [output.cached_tokens for output in (first, *again)] == [0, length, length, length]
    assert again[0].token_ids == first.token_ids
    assert again[0].max_probs == first.max_probs
    assert again[0].num_forwards == first.num_forwards
    assert again[0].model_tokens == first.model_tokens - length
    plain = Engine(EngineConfig(model=path, enable_prefix_caching=False))
    for ours, (_, changed) in zip(again, asked, strict=True):
        assert ours.token_ids == run(plain, [(prompt, changed)])[0].token_ids
    stats = engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (4 * length, 3 * length)
    assert not stats.pages_in_use
    assert stats.pages_cached == -(-length // 128)


def test_with_full_attention_the_first_blocks_length_is_part_of_the_key(path: str) -> None:
    engine = Engine(EngineConfig(model=path))
    params = DecodingParams(block_size=8, max_new_tokens=16, window_attention="full")
    run(engine, [([5, 6, 7], params)])
    assert run(engine, [([5, 6, 7], replace(params, max_new_tokens=24))])[0].cached_tokens == 3
    assert run(engine, [([5, 6, 7], replace(params, block_size=4))])[0].cached_tokens == 0
    assert run(engine, [([5, 6, 7], params.changed(window_attention="block_causal"))])[0].cached_tokens == 0


def test_the_cache_gives_way_to_requests(path: str) -> None:
    """A pool of six pages: prompts keep theirs only while nobody needs them."""
    page = 2 * 2 * 128 * 2 * 16 * 4
    engine = Engine(EngineConfig(model=path, kv_cache_memory=6 * page))
    params = DecodingParams(num_branches=1, block_size=8, max_new_tokens=20, tau_conf=0.5)
    for start in range(8):
        run(engine, [([4 + start + i for i in range(100)], params)])
    stats = engine.stats()
    assert stats.num_pages == 6
    assert stats.pages_cached == 4  # the last request needed two pages, and left one
    with pytest.raises(ParameterError, match="8 KV pages, but this server has 6"):
        engine.add(Request("large", tuple([5] * 120), replace(params, num_branches=3, max_new_tokens=136)))


def test_an_abort_ends_a_request_at_once_and_gives_its_pages_back(path: str) -> None:
    engine = Engine(EngineConfig(model=path, max_num_seqs=1, enable_prefix_caching=False))
    params = DecodingParams(max_new_tokens=64, ignore_eos=True)
    for name in ("running", "waiting", "last"):
        engine.add(Request(name, (5, 6, 7), params))
    engine.step()
    assert engine.stats().num_waiting == 2
    assert engine.abort("waiting")
    assert engine.abort("running")
    assert not engine.abort("running")
    assert engine.stats().pages_in_use == 0
    assert {update.request_id for update in engine.step()} == {"last"}
    with pytest.raises(ValueError, match="in use"):
        engine.add(Request("last", (1,), params))


def test_logits_that_are_not_finite_end_one_request_and_no_other(path: str) -> None:
    engine = Engine(EngineConfig(model=path, enable_prefix_caching=False))
    params = DecodingParams(num_branches=2, block_size=8, max_new_tokens=32, ignore_eos=True)
    good = run(engine, [([5, 6, 7], params)])[0]
    engine.runner.model.weights["embed.weight"][200] = float("nan")
    engine.add(Request("bad", (8, 200, 9), params))
    stream, output, errors = OutputStream([5, 6, 7], params, None), None, []
    engine.add(Request("good", (5, 6, 7), params))
    while engine.has_work():
        for update in engine.step():
            if update.request_id == "good":
                output = stream.push(update)
            else:
                errors.append(update.error)
    assert len(errors) == 1
    assert "not finite" in str(errors[0])
    assert output is not None
    assert output.token_ids == good.token_ids
    assert not engine.stats().pages_in_use


def test_a_committed_prefix_is_read_once_a_sequence(tmp_path: Path) -> None:
    """Bytes gathered by attention in a step hardly grow with the number of branches, whose prefix is the same. Heads of
    8 elements are left to torch."""
    path, gathered = str(write_dream(tmp_path, head_dim=8)), []
    for branches in (1, 7):
        engine = Engine(EngineConfig(model=path, enable_prefix_caching=False))
        engine.add(
            Request(
                "one", tuple([4 + i % 190 for i in range(1024)]), DecodingParams(num_branches=branches, ignore_eos=True)
            )
        )
        engine.step()
        before = engine.stats().gathered_bytes
        engine.step()
        gathered.append(engine.stats().gathered_bytes - before)
    position = 2 * 2 * 2 * 8 * 4  # keys and values, two layers, two heads of 8 float32
    assert gathered[0] >= 1024 * position
    assert gathered[1] <= gathered[0] + 6 * 64 * position


def test_several_streams_run_side_by_side(path: str) -> None:
    llm = LLM(path)
    params = DecodingParams(max_new_tokens=32, ignore_eos=True)
    first, second = (llm.stream(llm.tokenize(text), params) for text in ("hello", "the answer"))
    for _ in range(2):
        next(first), next(second)
    assert llm.engine.stats().num_running == 2
    first.close()
    *_, last = second
    assert last.output.token_ids == llm.generate("the answer", params, quiet=True)[0].token_ids


def test_a_stream_collected_in_the_middle_of_a_step_ends_after_it(path: str) -> None:
    llm = LLM(path)
    params = DecodingParams(max_new_tokens=32, ignore_eos=True)
    expected = llm.generate("the answer", params, quiet=True)[0].token_ids
    read, *abandoned = (llm.stream(llm.tokenize("the answer"), params) for _ in range(2))
    next(abandoned[0]), next(read)

    @contextmanager
    def collect(part: str, work: Any) -> Iterator[None]:
        yield
        abandoned.clear()  # drops the last reference to the stream, so Python closes it here, within the step

    llm.engine.runner.set_probe(collect)
    *_, last = read
    assert last.output.token_ids == expected
    assert not llm.engine.has_work()


def test_no_step_writes_a_cache_position_twice_and_every_branch_has_its_rank(path: str) -> None:
    """Two writes to one position would race on a device; on one rank no row is ever idle."""
    written: list[list[int]] = []

    @contextmanager
    def note(part: str, work: Any) -> Iterator[None]:
        if part == "forward":
            written.append(work.slot_mapping.tolist())
        yield

    engine = Engine(EngineConfig(model=path))
    engine.runner.set_probe(note)
    outputs = run(engine, requests(3, 12))
    assert len(written) > 10
    assert all(len(set(slots)) == len(slots) for slots in written)
    stats = engine.stats()
    assert stats.num_rows == sum(len(record.branches) for output in outputs for record in output.trace or ())
    assert stats.idle_rows == 0


@pytest.mark.parametrize("window", slow_but(["block_causal", "full"], ["full"]))
def test_as_windows_grow_a_step_has_fewer_branches_and_the_same_tokens_among_others(path: str, window: str) -> None:
    """Blocks that stay unfinished for long make windows of several blocks, too long for all branches together."""
    most = 200
    computed: list[int] = []

    @contextmanager
    def note(part: str, work: Any) -> Iterator[None]:
        if part == "forward":
            computed.append(len(work.tokens))
        yield

    params = DecodingParams(
        num_branches=7, block_size=16, max_new_tokens=120, tau_conf=1.0, tau_add=0.1, ignore_eos=True,
        window_attention=window,
    )  # fmt: skip
    asked = [([5 + n, 6, 7], params) for n in range(3)]
    config = EngineConfig(model=path, max_num_batched_tokens=most)
    engine = Engine(config)
    engine.runner.set_probe(note)
    outputs = run(engine, asked)
    alone = [run(Engine(config), [one])[0] for one in asked]
    assert [decisions(output) for output in outputs] == [decisions(output) for output in alone]
    assert max(computed) <= most
    for output in outputs:
        numbers = {len(record.branches) for record in output.trace or ()}
        assert max(numbers) == 8
        assert min(numbers - {1}) < 8
    engine.add(Request("at most", (5,), replace(params, block_size=25)))
    with pytest.raises(ParameterError, match="7 with block_size 26 need 208 tokens in one pass; .* is 200"):
        engine.add(Request("too many", (5,), replace(params, block_size=26)))


def test_pages_that_all_slots_share_are_not_reserved_for_each(path):
    """Of Fast-dLLM, which commits nothing to the pages behind it: 44 pages are room for two of these requests."""
    page = Engine(EngineConfig(model=path, kv_cache_memory=2**20)).kv_cache_memory // 16
    engine = Engine(EngineConfig(model=path, max_model_len=512, enable_prefix_caching=False, kv_cache_memory=44 * page))
    params = DecodingParams(base="fast_dllm", num_branches=7, block_size=8, max_new_tokens=40, ignore_eos=True)
    for name in ("first", "second"):
        engine.add(Request(name, tuple([5] * 400), params))
    for _ in range(6):
        engine.step()
    assert set(engine.scheduler.running) == {"first", "second"}
