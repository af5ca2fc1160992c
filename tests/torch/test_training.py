"""The training of the bundled model: its forward pass, and what answers after one prompt see of one another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers
from packaging import version
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen2Config, Qwen2Model

from scripts.demo_tokenizer import build
from scripts.train_demo import build_parser, main, write_held_out
from scripts.training import batches
from scripts.training.answers import OPENED_BLOCK, SYMBOLS, Answer, weighted_mean
from scripts.training.batches import Batch, Batches
from scripts.training.checkpoint import GEOMETRY
from scripts.training.focus import UNKNOWN
from scripts.training.forward import Forward, Shapes, attention_masks, dropped
from scripts.training.growth import with_layers, with_units
from scripts.training.noise import FAR_WEIGHT, block_causal, causal, noise
from scripts.training.trainer import CLEAN_FACTOR, GRADIENT_NORM, MOST_WAITING, NOISY_COPIES, Trainer, read_state

pytestmark = pytest.mark.skipif(
    version.parse(transformers.__version__).major < 5, reason="training needs transformers 5"
)


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    monkeypatch.setattr(batches, "POOL", 8)  # large pools take seconds to fill
    args = build_parser().parse_args(["--out", str(tmp_path), "--state", str(tmp_path / "state.pt")])
    return Trainer(args, build(tmp_path, corpus_size=300))


@pytest.fixture
def batch(trainer: Trainer) -> Batch:
    return Batches(trainer.tokenizer, 1, trainer.focus, plain=False, whole_blocks=True).next(4)


def whole_mask(batch: Batch, masks: list[Tensor], *, is_full: bool) -> Tensor:
    """Which positions see which, as transformers takes it: bool [n, 1, s, s]."""
    prompt = batch.prompt.shape[1]
    mask = torch.block_diag(torch.ones(prompt, prompt), *masks).bool()
    mask[:, :prompt] = True
    mask[:prompt, prompt:] = is_full
    is_padding = torch.arange(len(mask)) < batch.padding[:, None]
    return ((mask & ~is_padding[:, None, :]) | torch.eye(len(mask), dtype=torch.bool))[:, None]


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.1)], ids=str)
def test_the_forward_pass_is_that_of_transformers(
    trainer: Trainer, batch: Batch, copies: int, is_full: bool, dtype: torch.dtype, tolerance: float
) -> None:
    if is_full and copies > 1:
        pytest.skip("with full attention there is one answer")
    (n, prompt), length = batch.prompt.shape, batch.answer.shape[1]
    masks = [torch.ones(length, length, dtype=torch.bool)] if is_full else [causal(length)] * copies
    if copies > 1:
        masks[1] = block_causal(length, 16)
    for name, param in trainer.model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(param, mean=1.0, std=0.3)
    shapes = Shapes(prompt, length, copies)
    ids = torch.cat([batch.prompt, *[batch.answer] * copies], 1)
    with torch.no_grad():
        expected = trainer.model(
            ids,
            attention_mask={"full_attention": whole_mask(batch, masks, is_full=is_full)},
            position_ids=shapes.positions[None],
            use_cache=False,
        ).last_hidden_state
        attention = attention_masks(batch.padding, prompt, masks, is_full=is_full)
        normed = Forward(trainer.model, dtype, is_compiled=False).hidden(ids, shapes, attention)
    found = normed.float() * trainer.model.norm.weight.detach()
    assert found.shape == (n, prompt + copies * length, 192)
    for row, padding in enumerate(batch.padding):
        torch.testing.assert_close(found[row, padding:], expected[row, padding:], rtol=tolerance, atol=tolerance)


def test_prompts_alone_go_without_channels() -> None:
    y, is_prompt = torch.randn(2, 5, 4), (torch.arange(5) < 3)[:, None]
    keep = torch.tensor([[[0.0, 1.25, 1.25, 0.0]], [[1.25, 0.0, 1.25, 1.25]]])
    found = dropped(y, keep, is_prompt)
    torch.testing.assert_close(found[:, :3], y[:, :3] * keep)
    torch.testing.assert_close(found[:, 3:], y[:, 3:])


def test_dropout_is_of_training_alone(trainer: Trainer, batch: Batch) -> None:
    answers = [trainer.answers.clean(batch)]
    trainer.model.load_state_dict({n: torch.randn_like(w) * 0.1 for n, w in trainer.model.state_dict().items()})
    without = trainer.cross_entropies(batch, answers)
    trainer.args.dropout = 0.2
    assert not torch.allclose(trainer.cross_entropies(batch, answers), without)
    with torch.no_grad():
        torch.testing.assert_close(trainer.cross_entropies(batch, answers), without)


def test_answers_behind_one_prompt_are_learnt_as_if_each_stood_there_alone(trainer: Trainer, batch: Batch) -> None:
    answers = [trainer.answers.clean(batch), trainer.answers.noisy(batch), trainer.answers.noisy(batch)]
    with torch.no_grad():
        together = weighted_mean(trainer.cross_entropies(batch, answers), answers)
        alone = torch.stack([weighted_mean(trainer.cross_entropies(batch, [answer]), [answer]) for answer in answers])
    weights = torch.stack([answer.weight[answer.wanted].sum() for answer in answers])
    torch.testing.assert_close(together, (alone * weights).sum() / weights.sum())


def test_opened_blocks_are_learnt_as_if_each_followed_its_part_of_the_answer(trainer: Trainer, batch: Batch) -> None:
    block, length = OPENED_BLOCK, batch.answer.shape[1]
    opened = trainer.answers.with_opened_blocks(batch)
    offsets = opened.offsets
    assert offsets is not None
    losses = torch.zeros(opened.wanted.shape)
    with torch.no_grad():
        losses[opened.wanted] = trainer.cross_entropies(batch, [opened])
        autoregressive = trainer.answers.clean(batch)
        torch.testing.assert_close(
            losses[:, :length][autoregressive.wanted], trainer.cross_entropies(batch, [autoregressive])
        )
    for columns in (slice(length, length + block), slice(length + block, None)):
        start = int(offsets[columns][0])
        ids = torch.cat([batch.answer[:, :start], opened.ids[:, columns]], 1)
        mask = causal(start + block)
        mask[start:, start:] = True
        wanted = torch.cat([torch.zeros(len(ids), start, dtype=torch.bool), opened.wanted[:, columns]], 1)
        truth = torch.cat([batch.answer[:, :start], opened.truth[:, columns]], 1)
        alone = Answer(ids, truth, wanted, torch.ones(ids.shape), mask)
        with torch.no_grad():
            expected = trainer.cross_entropies(batch, [alone])
        torch.testing.assert_close(losses[:, columns][opened.wanted[:, columns]], expected)


def test_opened_blocks_are_masked_behind_some_filled_positions(trainer: Trainer, batch: Batch) -> None:
    length, starts = batch.answer.shape[1], set()
    for _ in range(50):
        opened = trainer.answers.with_opened_blocks(batch)
        assert opened.offsets is not None
        starts.add(int(opened.offsets[-OPENED_BLOCK]))
        is_masked = (opened.ids == trainer.mask)[:, length:].unflatten(1, (2, OPENED_BLOCK))
        assert (is_masked.int().diff(dim=-1) >= 0).all()  # filled from the left
        assert is_masked[..., -1].all()
        visible = ~is_masked.flatten(1)
        assert torch.equal(opened.ids[:, length:][visible], opened.truth[:, length:][visible])
        assert not (opened.wanted[:, length:] & visible).any()
    assert len(starts) > 1
    assert all(start % OPENED_BLOCK == 0 and start < length for start in starts)


def test_the_first_token_of_an_answer_counts_a_quarter(trainer: Trainer, batch: Batch) -> None:
    """It tells the style of the answer, which nothing in the question decides."""
    answer = trainer.answers.clean(batch)
    is_first = answer.wanted.nonzero(as_tuple=True)[1] == 0
    num_answers, num_others = int(is_first.sum()), int((~is_first).sum())
    expected = torch.tensor(num_answers / 4 / (num_answers / 4 + num_others))
    torch.testing.assert_close(weighted_mean(is_first.float(), [answer]), expected)
    torch.testing.assert_close(trainer.answers.noisy(batch).weight[:, 0], answer.weight[:, 0])


def test_noise_often_masks_a_whole_block_after_a_clean_beginning() -> None:
    """Decoding opens a block like that, so the model must have seen it."""
    answers = torch.ones(4000, 64, dtype=torch.long)
    masked, weight = noise(answers, 8, eos=0, generator=torch.Generator().manual_seed(0))
    blocks = masked.view(-1, 8, 8)
    front = blocks.any(2).int().argmax(1)
    is_whole = blocks[torch.arange(4000), front].all(1)
    assert 0.15 < is_whole.float().mean() < 0.3  # half of the noise is block-wise, and three eighths of it such
    assert weight.unique().tolist() == pytest.approx([FAR_WEIGHT, 1.0])


def test_tokens_that_the_model_is_sure_of_are_filled_for_a_second_step(trainer: Trainer, batch: Batch) -> None:
    answers = [trainer.answers.noisy(batch), trainer.answers.noisy(batch)]
    probabilities = [torch.rand(answer.ids.shape).round() * 0.98 + 0.01 for answer in answers]
    losses = torch.cat([-p.log() for p in probabilities], 1)[torch.cat([answer.wanted for answer in answers], 1)]
    for before, after, probability in zip(answers, trainer.answers.filled(answers, losses), probabilities, strict=True):
        is_filled = before.wanted & (probability > 0.5)
        assert 0 < is_filled.sum() < before.wanted.sum()
        assert torch.equal(after.wanted, before.wanted & ~is_filled)
        assert torch.equal(after.ids == trainer.mask, after.wanted)
        assert torch.equal(after.ids, torch.where(is_filled, before.truth, before.ids))


def test_a_batch_with_noise_has_a_second_step_without_its_autoregressive_answer(trainer: Trainer) -> None:
    trainer.args.ar_steps, trainer.args.batch = 0, 2
    trainer.args.clean_share = trainer.args.full_share = 0.0
    for _ in range(MOST_WAITING):
        trainer.train_step()
    first = trainer.waiting[0][0]
    batch, answers, kind = trainer.next_batch()
    assert (kind, len(answers)) == ("second", NOISY_COPIES)
    assert batch is first
    assert all(torch.equal(answer.truth, first.answer) for answer in answers)
    assert trainer.next_batch()[2] == "noisy"


def test_a_problem_is_solved_if_each_digit_and_sign_is_predicted(trainer: Trainer, batch: Batch) -> None:
    answers = [trainer.answers.clean(batch), trainer.answers.noisy(batch)]
    symbols = {trainer.tokenizer.get_vocab()[symbol] for symbol in SYMBOLS}
    probability = torch.full(answers[0].ids.shape, 0.9)
    is_symbol = torch.tensor([[token_id in symbols for token_id in row] for row in batch.answer.tolist()])
    probability[0][~is_symbol[0]] = 0.1  # words may be others
    probability[2, is_symbol[2].nonzero()[1]] = 0.4
    probabilities = torch.cat([probability, torch.full(answers[1].ids.shape, 0.1)], 1)
    losses = -probabilities[torch.cat([answer.wanted for answer in answers], 1)].log()
    assert trainer.answers.solved(batch, answers, losses) == [True, True, False, True]


def test_gradients_of_all_batches_are_cut_to_one_length(trainer: Trainer) -> None:
    """Otherwise the kinds of batches with the longest gradients would decide the direction of the steps."""
    trainer.args.ar_steps, trainer.args.batch, trainer.args.lr = 0, 2, 0.0
    for clean_share, full_share in [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0)]:
        trainer.args.clean_share, trainer.args.full_share = clean_share, full_share
        trainer.train_step()
        length = torch.stack([param.grad.norm() for param in trainer.model.parameters()]).norm()
        torch.testing.assert_close(length.item(), GRADIENT_NORM, rtol=1e-3, atol=0)


def test_autoregressive_batches_have_more_problems_and_say_what_the_model_solves(trainer: Trainer) -> None:
    trainer.args.ar_steps, trainer.args.batch = 0, 2
    trainer.args.clean_share, trainer.args.full_share = 1.0, 0.0
    trainer.train_step()
    assert trainer.focus.failures
    assert all(rate != UNKNOWN for rate in trainer.focus.failures.values())
    batch, answers, kind = trainer.next_batch()
    assert (kind, len(answers), len(batch.prompt)) == ("clean", 1, CLEAN_FACTOR * 2)
    assert not trainer.clean_batches.plain


def test_training_goes_on_from_the_weights_of_a_checkpoint(trainer: Trainer, tmp_path: Path) -> None:
    with torch.no_grad():
        trainer.model.norm.weight.fill_(1.5)
    trainer.update_average()
    trainer.export()
    options = ["--out", str(tmp_path), "--state", str(tmp_path / "state.pt"), "--seed", "3"]
    fresh = Trainer(build_parser().parse_args(options), trainer.tokenizer)
    gone_on = Trainer(build_parser().parse_args([*options, "--go-on"]), trainer.tokenizer)
    assert not torch.equal(fresh.model.embed_tokens.weight, trainer.model.embed_tokens.weight)
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(gone_on.model.state_dict()[name], weight.bfloat16().float()), name
    assert gone_on.step == 0


def test_a_run_first_measures_what_the_model_fails_at(trainer: Trainer) -> None:
    """Without training it; a run that goes on from a saved state has measured it before."""
    trainer.args.batch, trainer.args.measure_steps, trainer.num_steps = 2, 3, 0
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    trainer.run()
    assert 0 < len(trainer.focus.failures) <= 3 * CLEAN_FACTOR * 2
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(weight, before[name]), name

    trainer.step = trainer.num_steps = 1
    trainer.save()
    resumed = Trainer(trainer.args, trainer.tokenizer)
    state = read_state(trainer.args)
    assert state is not None
    resumed.resume(state)
    assert resumed.step == 1
    assert resumed.focus.failures == trainer.focus.failures


def test_the_state_of_another_run_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    trainer.args.ar_steps, trainer.args.diffusion_steps = 1, 2
    trainer.step = 3
    trainer.save()
    with pytest.raises(SystemExit, match="has all 3 steps; name another file"):
        read_state(trainer.args)
    trainer.args.seed += 1
    with pytest.raises(SystemExit, match=r"is of a run with --seed \d+, not \d+; name another file"):
        read_state(trainer.args)
    trainer.args.out = tmp_path / "elsewhere"
    with pytest.raises(SystemExit, match="is the state of .*; name another file"):
        read_state(trainer.args)


def test_what_a_run_cannot_go_on_from_is_named_before_a_tokenizer_is_looked_for(
    trainer: Trainer, tmp_path: Path
) -> None:
    trainer.save()
    elsewhere = ["--out", str(tmp_path / "elsewhere"), "--held-out", str(tmp_path / "heldout.jsonl")]
    with pytest.raises(SystemExit, match="is the state of .*; name another file by --state"):
        main([*elsewhere, "--state", str(trainer.args.state)])
    with pytest.raises(SystemExit, match=r"elsewhere has no vocab.json: a run that goes on needs the checkpoint"):
        main([*elsewhere, "--state", str(tmp_path / "new.pt"), "--go-on"])


def test_held_out_problems_are_written_once(tmp_path: Path) -> None:
    """Models are compared by the same problems, although the generator changes."""
    file = tmp_path / "new" / "heldout.jsonl"
    write_held_out(file, 3)
    assert len(file.read_text().splitlines()) == 3
    write_held_out(file, 4)
    assert len(file.read_text().splitlines()) == 3


def test_the_checkpoint_has_the_mean_of_the_last_weights(trainer: Trainer, tmp_path: Path) -> None:
    """Of all weights, the first ones too, while they are fewer than the steps to average over; then old ones fade."""
    trainer.args.average_steps = 3
    weight = trainer.model.norm.weight
    for step, (value, mean) in enumerate([(4.0, 2.5), (7.0, 4.0), (1.0, 3.0), (6.0, 4.0)], 1):
        with torch.no_grad():
            weight.fill_(value)
        trainer.step = step
        trainer.update_average()
        torch.testing.assert_close(trainer.average["norm.weight"], torch.full_like(weight, mean))
    trainer.save()
    torch.testing.assert_close(load_file(tmp_path / "model.safetensors")["model.norm.weight"][0].item(), 4.0)
    fresh = Trainer(trainer.args, trainer.tokenizer)
    state = read_state(trainer.args)
    assert state is not None
    fresh.resume(state)
    assert torch.equal(fresh.average["norm.weight"], trainer.average["norm.weight"])
    assert torch.equal(fresh.model.norm.weight, weight)


def test_new_layers_change_nothing_at_first(trainer: Trainer, batch: Batch) -> None:
    """A model of three layers grows to twelve: each old layer is followed by three new ones."""
    weights = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    small = {name: weight for name, weight in weights.items() if not re.search(r"layers\.([3-9]|1\d)\.", name)}
    grown = with_layers(small, 12)
    assert grown.keys() == weights.keys()
    for new, old in enumerate([0] * 4 + [1] * 4 + [2] * 4):
        for part in ("self_attn.q_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight"):
            weight = grown[f"layers.{new}.{part}"]
            expected = small[f"layers.{old}.{part}"]
            is_output_of_a_new_layer = part == "mlp.down_proj.weight" and new % 4 > 0
            assert torch.equal(weight, torch.zeros_like(expected) if is_output_of_a_new_layer else expected)
    few = Qwen2Model(Qwen2Config(**{**GEOMETRY, "num_hidden_layers": 3}))
    few.load_state_dict(small)
    trainer.model.load_state_dict(grown)
    with torch.no_grad():
        expected, found = (model(batch.prompt).last_hidden_state for model in (few, trainer.model))
    assert torch.equal(found, expected)


def test_layers_are_not_taken_away(trainer: Trainer) -> None:
    with pytest.raises(ValueError, match=r"has 12 layers, and a model of 8 was asked for"):
        with_layers(trainer.model.state_dict(), 8)


def test_new_units_change_nothing_at_first(trainer: Trainer, batch: Batch) -> None:
    """Feed-forward parts of 512 units grow to 1,024: the new units read the input, and add nothing."""
    wide = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    narrow = dict(wide)
    for layer in range(12):
        part = f"layers.{layer}.mlp."
        narrow[part + "gate_proj.weight"] = wide[part + "gate_proj.weight"][:512]
        narrow[part + "up_proj.weight"] = wide[part + "up_proj.weight"][:512]
        narrow[part + "down_proj.weight"] = wide[part + "down_proj.weight"][:, :512]
    grown = with_units(narrow, wide)
    assert torch.equal(grown["layers.3.mlp.up_proj.weight"], wide["layers.3.mlp.up_proj.weight"])
    assert not grown["layers.3.mlp.down_proj.weight"][:, 512:].any()
    few = Qwen2Model(Qwen2Config(**{**GEOMETRY, "intermediate_size": 512}))
    few.load_state_dict(narrow)
    trainer.model.load_state_dict(grown)
    with torch.no_grad():
        expected, found = (model(batch.prompt).last_hidden_state for model in (few, trainer.model))
    torch.testing.assert_close(found, expected)


def test_units_are_not_taken_away(trainer: Trainer) -> None:
    weights = {"layers.0.mlp.down_proj.weight": trainer.model.state_dict()["layers.0.mlp.down_proj.weight"]}
    narrow = {name: weight[:, :512] for name, weight in weights.items()}
    with pytest.raises(ValueError, match=r"has 1024 units in layers.0.mlp.down.*, and a model of 512"):
        with_units(weights, narrow)
