"""Log-likelihoods by Monte-Carlo masking, held to a dense model and to what can be worked out exactly."""

from pathlib import Path

import pytest
import torch

from lopa_ascend import LLM
from lopa_ascend.config import ParameterError
from scripts.eval.likelihood import MaskedLikelihood
from tests import reference
from tests.tiny import VOCAB_SIZE, write_dream

MASK = VOCAB_SIZE - 1
CONTEXT, TARGET = [5, 9, 200, 31], [7, 8, 250, 3]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dream(tmp_path_factory.mktemp("model"), eos_token_id=3)


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(path, max_num_seqs=1, max_model_len=512)


def dense_losses(path: Path, noisy: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The cross entropy at each masked position of a batch, summed by row; every position sees all others."""
    model = reference.load(path)
    n = len(tokens)
    bias = torch.zeros(len(noisy), 1, n, n)
    with torch.no_grad():
        logits = model(noisy, attention_mask=bias).logits
    logprobs = logits[:, :-1].log_softmax(-1).gather(2, tokens[None, 1:, None].expand(len(noisy), -1, 1))[..., 0]
    return -(logprobs * (noisy[:, 1:] == MASK)).sum(1)


@pytest.mark.parametrize("length", [4, 150])
def test_losses_of_masked_tokens_are_those_of_a_dense_model(llm: LLM, path: Path, length: int):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, MASK, (4 + length,), generator=generator)
    likelihood = MaskedLikelihood(llm.engine, num_samples=4, batch_size=4)
    noisy, share = likelihood.draw(tokens, 4, generator)
    assert not (noisy[:, :4] == MASK).any()
    assert not (noisy[:, -1] == MASK).any()
    assert (noisy == MASK).any()
    expected = (dense_losses(path, noisy, tokens) / share).mean()
    assert likelihood.masked_loss(noisy, tokens, share) == pytest.approx(float(expected), rel=1e-4)


def test_the_estimate_of_one_token_is_its_log_probability(llm: LLM, path: Path):
    """Behind the context stand one token and the EOS, which is never masked: every draw masks that token or nothing."""
    tokens = torch.tensor([*CONTEXT, 7, 3])
    noisy = tokens.clone()
    noisy[4] = MASK
    exact = -float(dense_losses(path, noisy[None], tokens)[0])
    found = MaskedLikelihood(llm.engine, num_samples=4096, batch_size=256).estimate(CONTEXT, [7, 3])
    assert found == pytest.approx(exact, rel=0.1)


def test_estimates_do_not_depend_on_what_was_asked_before(llm: LLM):
    likelihood = MaskedLikelihood(llm.engine, num_samples=8, batch_size=4)
    first = likelihood.estimate(CONTEXT, TARGET)
    likelihood.estimate([1] * 200, TARGET)
    assert likelihood.estimate(CONTEXT, TARGET) == first < 0


def test_requests_that_run_are_not_disturbed(llm: LLM):
    alone = llm.generate([CONTEXT], quiet=True)[0].token_ids
    stream = llm.stream(CONTEXT)
    next(stream)
    MaskedLikelihood(llm.engine, num_samples=4, batch_size=4).estimate(CONTEXT, TARGET)
    *_, last = stream
    assert last.output.token_ids == alone


def test_several_ranks_are_refused(llm: LLM):
    object.__setattr__(llm.engine.config, "tensor_parallel_size", 2)
    try:
        with pytest.raises(ParameterError, match="tensor_parallel_size: must be 1 for log-likelihoods"):
            MaskedLikelihood(llm.engine, num_samples=4, batch_size=4)
    finally:
        object.__setattr__(llm.engine.config, "tensor_parallel_size", 1)
