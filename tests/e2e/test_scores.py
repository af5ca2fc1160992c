"""Log probabilities of continuations in one pass over masks: held to a dense model, and to what decoding predicts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lopa_ascend import LLM, ParameterError
from lopa_ascend.backend.compiler import Eager
from lopa_ascend.graph import setup
from tests import reference
from tests.tiny import VOCAB_SIZE, write_dream

MASK = VOCAB_SIZE - 1
PROMPT = [5, 9, 100, 31, 7]
TEXTS = [[7, 8, 250, 3, 11, 12], [300], [0, 0, 0]]
GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "models"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dream(tmp_path_factory.mktemp("model"), eos_token_id=3)


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, max_num_seqs=2, max_model_len=512, threads=1) as found:
        yield found


def test_on_a_whole_canvas_they_are_those_of_a_dense_model(llm: LLM, path: Path) -> None:
    longest = max(map(len, TEXTS))
    canvas = torch.tensor([[*PROMPT, *[MASK] * longest]])
    n = canvas.shape[1]
    with torch.no_grad():
        logits = reference.load(path)(canvas, attention_mask=torch.zeros(1, 1, n, n)).logits[0]
    logprobs = logits[len(PROMPT) - 1 :].log_softmax(-1)
    found = llm.score(PROMPT, TEXTS, llm.params(decoding="parallel"))
    expected = [[float(logprobs[place, token]) for place, token in enumerate(text)] for text in TEXTS]
    assert [list(values) for values in found] == [pytest.approx(values, abs=1e-4) for values in expected]


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "sdar": ("sdar/model_a", {"decoding": "d2f", "block_size": 8}),
    "fast_dllm_v2": ("fastdllm2/model_a", {"decoding": "d2f", "block_size": 32}),
}


@pytest.mark.parametrize("attention", ["full", "block_causal"])
def test_in_a_window_they_are_those_of_the_first_pass(llm: LLM, attention: str) -> None:
    fields = {"window_attention": attention, "decoding": "d2f", "block_size": 6}
    _compare_with_decoding(llm, fields, len(TEXTS[0]))


@pytest.mark.parametrize("family", FAMILIES)
def test_of_block_causal_models_the_first_block_is_that_of_the_first_pass(family: str) -> None:
    model, fields = FAMILIES[family]
    llm = LLM(GOLDEN / model, threads=1, max_num_seqs=2)
    _compare_with_decoding(llm, fields, llm.params(**fields).block_size - len(PROMPT) % llm.params(**fields).block_size)
    (twice,) = llm.score(PROMPT, [[1] * 20], llm.params(**fields))  # several blocks
    assert llm.score(PROMPT, [[1] * 20], llm.params(**fields)) == [twice]
    assert len(twice) == 20
    assert max(twice) < 0


@pytest.mark.parametrize("max_num_batched_tokens", [40, 2048])
def test_a_causal_model_predicts_each_token_from_those_before_it(max_num_batched_tokens: int) -> None:
    llm = LLM(GOLDEN / "nemotron/model_a", threads=1, max_num_batched_tokens=max_num_batched_tokens)
    params = llm.params(decoding="ar", max_new_tokens=6, top_logprobs=5, ignore_eos=True)
    prompt = list(range(20, 95))
    (output,) = llm.generate([prompt], params, quiet=True)
    ids, places = list(output.token_ids), output.alternatives
    others = [[*ids[:place], places[place][rank][0]] for place, rank in ((0, 1), (1, 3), (3, 1), (5, 4))]
    found = llm.score(prompt, [ids, *others, ids[:4]], llm.params(decoding="causal_blocks", block_size=4))
    likely = [probs[0][1] for probs in places]
    expected = [likely, *([*likely[:p], places[p][r][1]] for p, r in ((0, 1), (1, 3), (3, 1), (5, 4))), likely[:4]]
    for values, probs in zip(found, expected, strict=True):
        assert torch.tensor(values).exp().tolist() == pytest.approx(probs, rel=1e-3)
    assert llm.engine.stats().pages_in_use == 0


def _compare_with_decoding(llm: LLM, fields: dict[str, Any], length: int) -> None:
    """Compares with the most probable tokens of a pass that fills everything."""
    params = llm.params(**fields, max_new_tokens=length, tau_conf=0.0, top_logprobs=9, num_branches=0, ignore_eos=True)
    (output,) = llm.generate([PROMPT], params, quiet=True)
    texts = [[places[rank][0] for places in output.alternatives] for rank in range(9)]
    found = llm.score(PROMPT, texts, params)
    expected = [[places[rank][1] for places in output.alternatives] for rank in range(9)]
    for values, probs in zip(found, expected, strict=True):
        assert torch.tensor(values).exp().tolist() == pytest.approx(probs, rel=1e-3)


def test_they_do_not_depend_on_neighbours_or_on_the_cache(llm: LLM) -> None:
    first = llm.score(PROMPT, TEXTS)
    stream = llm.stream([1, 2, 3], llm.params(max_new_tokens=64, ignore_eos=True))
    next(stream)
    assert llm.score(PROMPT, TEXTS) == first
    assert llm.engine.scheduler.prefix_hits
    stream.close()
    assert not llm.engine.has_work()


def test_what_does_not_fit_into_one_pass_is_refused(llm: LLM) -> None:
    for texts, words in (([[MASK]], "the mask"), ([[1] * 600], "600"), ([], "must not be empty"), ([[]], "empty")):
        with pytest.raises(ParameterError, match=words):
            llm.score(PROMPT, texts)


def test_requests_of_compiled_steps_run_beside_them(path: Path, monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """The second time the prompt is cached, so that a compiled step could decode a request that generates."""
    monkeypatch.setattr(setup, "load_compiler", lambda *_, **__: Eager())
    compiled = LLM(path, max_num_seqs=2, max_model_len=512, threads=1, graph_mode="inductor")
    expected = llm.score(PROMPT, TEXTS)
    for _ in range(2):
        found = compiled.score(PROMPT, TEXTS)
        assert [list(values) for values in found] == [pytest.approx(list(values), abs=1e-5) for values in expected]
    graphs = compiled.engine.stats().graphs
    assert graphs is not None
    assert graphs.eager_steps == {"continuations": 1}
