"""Trains the bundled model, and writes it as a Dream checkpoint."""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2Model

from lopa_ascend import LLM
from scripts.demo_problems import problems
from scripts.demo_tokenizer import EOS, MASK
from scripts.eval_demo import decoding, evaluate
from scripts.training import checkpoint
from scripts.training.answers import Answer, Answers, weighted_mean
from scripts.training.batches import Batch, Batches
from scripts.training.focus import Focus
from scripts.training.forward import Forward, Shapes, attention_masks
from scripts.training.growth import with_layers, with_units
from scripts.training.muon import Muon

WARM_UP_STEPS = 40
DECAY_SHARE = 0.5
"""Share of the steps, the last ones, over which the learning rate falls to zero."""
CLEAN_FACTOR = 3
"""A clean batch after the warm-up has so many times the problems of another, in about as many tokens: reading is
learned from many problems, and an answer to predict autoregressively with two opened blocks is enough for it."""
GRADIENT_NORM = 0.05
"""Largest norm of a gradient. Most exceed it, so that all batches count alike: otherwise those for a second time, with
few positions to predict, all of them hard, would decide the direction of the steps."""
NOISY_COPIES = 2
"""Answers with different noise that a batch has after each prompt; a prompt costs as much as an answer."""
MOST_WAITING = 8
"""Batches that wait for their second step at a time."""
DECISIVE = (
    "ar_steps", "diffusion_steps", "batch", "lr", "clean_share", "full_share", "least_share", "dropout",
    "average_steps", "seed", "dtype",
)  # fmt: skip
"""Arguments that decide what a run trains: one that goes on must have the same."""
EVALUATION_SEED = 12345
"""Of problems on the training side that no batch is drawn from."""


Kind = Literal["clean", "noisy", "second", "full"]
"""Of a batch.

"clean": answers are predicted autoregressively; after the warm-up two opened blocks of each as well.
"noisy": block-causal, two answers with different noise, and one that is predicted autoregressively.
"second": a noisy batch once more, with what the model predicted rightly filled in.
"full": full attention, one answer with noise.
"""


def read_state(args: argparse.Namespace) -> dict[str, Any] | None:
    """The saved state that a run goes on from; None if there is none.

    Args:
        args: the arguments of scripts.train_demo.

    Raises:
        SystemExit: the state has all steps, or is of another model directory or of a run with other arguments.
    """
    if not args.state.exists():
        return None
    state: dict[str, Any] = torch.load(args.state, weights_only=True)
    other = "name another file by --state"
    if state["out"] != str(args.out.resolve()):
        raise SystemExit(f"{args.state} is the state of {state['out']}; {other}")
    for name, value in state["arguments"].items():
        if (given := getattr(args, name)) != value:
            flag = "--" + name.replace("_", "-")
            raise SystemExit(f"{args.state} is of a run with {flag} {value}, not {given}; {other}")
    if state["step"] >= args.ar_steps + args.diffusion_steps:
        raise SystemExit(f"{args.state} has all {state['step']} steps; {other}")
    return state


class Trainer:
    """The model in training.

    Args:
        args: the arguments of scripts.train_demo.
        tokenizer: that lies beside the checkpoint.
    """

    def __init__(self, args: argparse.Namespace, tokenizer: Tokenizer):
        self.args = args
        self.tokenizer = tokenizer
        vocab = self.tokenizer.get_vocab()
        self.eos, self.mask = vocab[EOS], vocab[MASK]
        torch.manual_seed(args.seed)
        self.model = Qwen2Model(Qwen2Config(**checkpoint.GEOMETRY))
        self.optimizers = self._initialise()
        if args.go_on:
            weights = load_file(args.out / "model.safetensors")
            named = {name.removeprefix("model."): weight.float() for name, weight in weights.items()}
            deep = with_layers(named, self.model.config.num_hidden_layers)
            self.model.load_state_dict(with_units(deep, self.model.state_dict()))
        self.average = {name: weight.clone() for name, weight in self.model.state_dict().items()}
        """The mean of the weights over the last steps, by name; the checkpoint has these."""
        self.forward = Forward(self.model, getattr(torch, args.dtype), is_compiled=args.compile)
        self.step = 0
        """Steps that were made."""
        self.focus = Focus(args.least_share)
        self.clean_batches = self._new_batches(plain=True, whole_blocks=False)
        self.batches = self._new_batches(plain=False, whole_blocks=True)
        self.waiting: deque[tuple[Batch, list[Answer]]] = deque()
        """Batches for a second step, with what their first one filled."""
        self.generator = torch.Generator().manual_seed(args.seed + 2)
        self.answers = Answers(vocab, self.generator)
        self.num_steps: int = args.ar_steps + args.diffusion_steps

    def _initialise(self) -> list[torch.optim.Optimizer]:
        """Draws the weights; returns an optimizer for the matrices within layers, and one for the rest."""
        matrices: list[torch.nn.Parameter] = []
        rest: list[torch.nn.Parameter] = []
        for name, param in self.model.named_parameters():
            is_embedding = "embed" in name
            if param.dim() == 2:
                torch.nn.init.normal_(param, std=0.02 if is_embedding else param.shape[1] ** -0.5)
            if param.dim() == 2 and not is_embedding:
                matrices.append(param)
            else:
                rest.append(param)
        return [
            Muon(matrices, self.args.lr, getattr(torch, self.args.dtype)),
            torch.optim.AdamW(rest, lr=self.args.lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def _new_batches(self, *, plain: bool, whole_blocks: bool) -> Batches:
        """Batches of problems that no earlier step had."""
        seed = 2 * (self.args.seed + 1 + self.step) + whole_blocks
        return Batches(self.tokenizer, seed, self.focus, plain=plain, whole_blocks=whole_blocks)

    # ---- steps -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Trains to the end, with a progress bar."""
        if self.step == 0:
            self.measure()
        recent: list[float] = []
        remaining = range(self.step + 1, self.num_steps + 1)
        for step in tqdm(remaining, initial=self.step, total=self.num_steps, mininterval=30):
            recent.append(self.train_step())
            self.step = step
            self.update_average()
            is_last = step == self.num_steps
            if step % self.args.log_every == 0:
                losses = [loss for loss in recent if not math.isnan(loss)]
                mean = sum(losses) / max(1, len(losses))
                tqdm.write(f"step {step} loss {mean:.4f} at {time.strftime('%H:%M:%S')}")
                recent.clear()
            if step % self.args.save_every == 0 or is_last:
                self.save()
            if step > self.args.ar_steps and (step % self.args.eval_every == 0 or is_last):
                tqdm.write(f"step {step} {self.evaluate()}")

    @torch.no_grad()
    def measure(self) -> None:
        """Finds out at which templates the model fails, without training it."""
        batches = Batches(self.tokenizer, 2 * self.args.seed, self.focus, plain=True, whole_blocks=False)
        for _ in tqdm(range(self.args.measure_steps), desc="measuring", mininterval=30):
            batch = batches.next(CLEAN_FACTOR * self.args.batch)
            answers = [self.answers.clean(batch)]
            self.focus.record(batch.sources, self.answers.solved(batch, answers, self.cross_entropies(batch, answers)))

    def train_step(self) -> float:
        """Makes one step; returns the loss, NaN if nothing was masked."""
        batch, answers, kind = self.next_batch()
        losses = self.cross_entropies(batch, answers, is_full=kind == "full")
        if not len(losses):
            return math.nan
        loss = weighted_mean(losses, answers)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM)
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = self.args.lr * self.rate()
            optimizer.step()
        losses = losses.detach()
        if kind in ("clean", "noisy"):
            self.focus.record(batch.sources, self.answers.solved(batch, answers, losses))
        if kind == "noisy":
            self.waiting.append((batch, self.answers.filled(answers, losses)[1:]))
        return float(loss.detach())

    def update_average(self) -> None:
        """Takes the weights after a step into their mean: of all steps at first, then with a memory of
        ``average_steps``."""
        share = 1 / min(self.step + 1, self.args.average_steps)
        for name, weight in self.model.state_dict().items():
            self.average[name].lerp_(weight, share)

    def next_batch(self) -> tuple[Batch, list[Answer], Kind]:
        """Problems, the answers after each prompt, and which kind of batch it is."""
        if self.step < self.args.ar_steps:
            batch = self.clean_batches.next(self.args.batch)
            return batch, [self.answers.clean(batch)], "clean"
        if self.clean_batches.plain:
            self.clean_batches = self._new_batches(plain=False, whole_blocks=False)
        if len(self.waiting) == MOST_WAITING:
            return *self.waiting.popleft(), "second"
        chosen = torch.rand((), generator=self.generator)
        if chosen < self.args.clean_share:
            batch = self.clean_batches.next(CLEAN_FACTOR * self.args.batch)
            return batch, [self.answers.with_opened_blocks(batch)], "clean"
        batch = self.batches.next(self.args.batch)
        if chosen < self.args.clean_share + self.args.full_share:
            return batch, [self.answers.noisy(batch, is_full=True)], "full"
        return batch, [self.answers.clean(batch), *(self.answers.noisy(batch) for _ in range(NOISY_COPIES))], "noisy"

    def cross_entropies(self, batch: Batch, answers: list[Answer], *, is_full: bool = False) -> torch.Tensor:
        """Cross entropy [m] of the wanted positions, row by row; the hidden state of a position predicts the next one.

        Args:
            batch: prompts, and how they are padded.
            answers: answers after each prompt, each of l positions; none sees another.
            is_full: the prompt sees the answer, of which there is one.
        """
        prompt, length = batch.prompt.shape[1], answers[0].ids.shape[1]
        shapes = Shapes(prompt, length, len(answers), answers[0].offsets)
        masks = attention_masks(batch.padding, prompt, [answer.mask for answer in answers], is_full=is_full)
        ids = torch.cat([batch.prompt, *(answer.ids for answer in answers)], 1)
        dropout = self.args.dropout if torch.is_grad_enabled() else 0.0
        hidden = self.forward.hidden(ids, shapes, masks, dropout)
        # A position is predicted by the one before it, the first of each answer by the last of the prompt.
        position = torch.arange(length * len(answers))
        predictor = torch.where(position % length == 0, prompt - 1, prompt - 1 + position)
        wanted = torch.cat([answer.wanted for answer in answers], 1)
        truth = torch.cat([answer.truth for answer in answers], 1)[wanted]
        row, column = wanted.nonzero(as_tuple=True)
        return self.forward.cross_entropy(hidden[row, predictor[column]], truth)

    def rate(self) -> float:
        """The learning rate as a share of ``lr``: a warm-up, and a linear decay to zero at the end."""
        warm_up = (self.step + 1) / WARM_UP_STEPS
        decay = (self.num_steps - self.step) / (DECAY_SHARE * self.num_steps)
        return min(1.0, warm_up, max(0.0, decay))

    # ---- evaluation and files --------------------------------------------------------------------------------------

    def evaluate(self) -> str:
        """Exact answers of D2F on 40 problems of the training side that no batch is drawn from, in words."""
        self.export()
        chosen = itertools.islice(problems(EVALUATION_SEED, held_out=False, plain=True), 40)
        asked = [(problem.question, problem.result) for problem in chosen if problem.result is not None]
        outcome = evaluate(LLM(self.args.out), asked, decoding(0, 0.9))
        return f"d2f exact {outcome.accuracy:.0%}, tokens per forward {outcome.tpf:.2f}"

    def resume(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state that ``read_state`` has read."""
        self.model.load_state_dict(state["model"])
        self.average = state["average"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.generator.set_state(state["generator"])
        self.step = state["step"]
        self.focus.failures = state["failures"]
        self.clean_batches = self._new_batches(plain=self.step < self.args.ar_steps, whole_blocks=False)
        self.batches = self._new_batches(plain=False, whole_blocks=True)
        print(f"resumed at step {self.step}")

    def save(self) -> None:
        """Writes the state from which a run can go on, and the checkpoint."""
        state = {
            "model": self.model.state_dict(),
            "average": self.average,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "generator": self.generator.get_state(),
            "step": self.step,
            "out": str(self.args.out.resolve()),
            "arguments": {name: getattr(self.args, name) for name in DECISIVE},
            "failures": self.focus.failures,
        }
        self.args.state.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, self.args.state.with_suffix(".tmp"))
        self.args.state.with_suffix(".tmp").replace(self.args.state)
        self.export()

    def export(self) -> None:
        """Writes the checkpoint, with the mean of the weights of the last steps."""
        checkpoint.write(self.args.out, self.average, eos=self.eos, mask=self.mask)
