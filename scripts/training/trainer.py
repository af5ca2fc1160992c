"""Trains the bundled model, and writes it as a Dream checkpoint."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2Model

from lopa_ascend import LLM
from scripts.demo_problems import problems
from scripts.demo_tokenizer import EOS, MASK, VOCABULARY, build, load
from scripts.eval_demo import decoding, evaluate
from scripts.training.batches import Batches, Tokens
from scripts.training.muon import Muon
from scripts.training.noise import BLOCK, block_causal, noise, prefix_causal

GEOMETRY: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "attention_dropout": 0.0,
}  # fmt: skip
WARM_UP_STEPS = 40
EVALUATION_SEED = 12345
"""Of problems on the training side that no batch is drawn from."""


@dataclass
class Batch:
    """What one training step learns from; s positions of prompt and answer, of which a belong to the answer."""

    ids: torch.Tensor
    """Token ids of prompt and noisy answer [n, s]."""
    mask: torch.Tensor
    """Attention mask [n, 1, s, s] bool."""
    prompt: int
    """Positions of the prompt."""
    wanted: torch.Tensor
    """Positions of the answer to predict [n, a] bool."""
    answer: torch.Tensor
    """Token ids of the answer without noise [n, a]."""
    weight: torch.Tensor
    """Weight of each position in the loss [n, a]."""


class Trainer:
    """The model in training.

    Args:
        args: the arguments of scripts.train_demo.
    """

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.tokenizer = load(args.out) if args.state.exists() else build(args.out)
        vocab = self.tokenizer.get_vocab()
        self.eos, self.mask = vocab[EOS], vocab[MASK]
        torch.manual_seed(args.seed)
        self.model = Qwen2Model(Qwen2Config(**GEOMETRY))
        self.optimizers = self._initialise()
        self.step = 0
        """Steps that were made."""
        self.batches = self._new_batches(plain=True)
        self.generator = torch.Generator().manual_seed(args.seed + 2)
        self.num_steps: int = args.ar_steps + args.diffusion_steps

    def _initialise(self) -> list[torch.optim.Optimizer]:
        """Draws the weights; returns an optimizer for the matrices within layers, and one for the rest."""
        matrices: list[torch.nn.Parameter] = []
        rest: list[torch.nn.Parameter] = []
        for name, param in self.model.named_parameters():
            is_embedding = "embed" in name
            if param.dim() == 2:
                torch.nn.init.normal_(param, std=0.02 if is_embedding else param.shape[1] ** -0.5)
            (matrices if param.dim() == 2 and not is_embedding else rest).append(param)
        return [
            Muon(matrices, self.args.lr),
            torch.optim.AdamW(rest, lr=self.args.lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def _new_batches(self, plain: bool) -> Batches:
        """Batches of problems that no earlier step had."""
        return Batches(self.tokenizer, self.args.seed + 1 + self.step, plain=plain)

    # ---- steps -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Trains from where the last run stopped to the end, with a progress bar."""
        self.resume()
        recent: list[float] = []
        remaining = range(self.step + 1, self.num_steps + 1)
        for step in tqdm(remaining, initial=self.step, total=self.num_steps, mininterval=30):
            recent.append(self.train_step())
            self.step = step
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

    def train_step(self) -> float:
        """Makes one step; returns the loss, NaN if nothing was masked."""
        is_ar = self.step < self.args.ar_steps
        if not is_ar:
            if self.batches.plain:
                self.batches = self._new_batches(plain=False)
            is_ar = bool(torch.rand((), generator=self.generator) < self.args.ar_share)
        batch = self.ar_batch() if is_ar else self.diffusion_batch()
        if not batch.wanted.any():
            return math.nan
        loss = self.loss(batch)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = self.args.lr * self.rate()
            optimizer.step()
        return float(loss.detach())

    def ar_batch(self) -> Batch:
        """An autoregressive batch: every position up to the first EOS is predicted."""
        tokens = self.batches.next(self.args.batch)
        prompt, answer = tokens.prompt, tokens.answer
        wanted = torch.arange(answer.shape[1]) <= answer.ne(self.eos).sum(1, keepdim=True)
        mask = without_padding(prefix_causal(prompt.shape[1], answer.shape[1]), tokens)
        return Batch(torch.cat([prompt, answer], 1), mask, prompt.shape[1], wanted, answer, torch.ones(answer.shape))

    def diffusion_batch(self) -> Batch:
        """A batch of masked diffusion: block-causal, or with full attention and a random number of blocks."""
        tokens = self.batches.next(self.args.batch)
        prompt, answer = tokens.prompt, tokens.answer
        num_prompt, num_blocks = prompt.shape[1], answer.shape[1] // BLOCK
        masked, weight = noise(answer, self.eos, self.generator)
        noisy = torch.where(masked, self.mask, answer)
        if torch.rand((), generator=self.generator) < self.args.full_share:
            num_blocks = 1 + int(torch.randint(num_blocks, (), generator=self.generator))
            length = num_prompt + num_blocks * BLOCK
            mask = torch.ones(1, 1, length, length, dtype=torch.bool)
        else:
            mask = block_causal(num_prompt, num_blocks)
        end = num_blocks * BLOCK
        ids = torch.cat([prompt, noisy[:, :end]], 1)
        mask = without_padding(mask, tokens)
        return Batch(ids, mask, num_prompt, masked[:, :end], answer[:, :end], weight[:, :end])

    def loss(self, batch: Batch) -> torch.Tensor:
        """Weighted mean cross entropy of the wanted positions; the hidden state of position q - 1 predicts q."""
        row, column = batch.wanted.nonzero(as_tuple=True)
        attention_mask = {"full_attention": batch.mask}
        hidden = self.model(batch.ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        logits = F.linear(hidden[row, batch.prompt + column - 1], self.model.embed_tokens.weight)
        losses = F.cross_entropy(logits, batch.answer[batch.wanted], reduction="none")
        weight = batch.weight[batch.wanted]
        return (losses * weight).sum() / weight.sum()

    def rate(self) -> float:
        """The learning rate as a share of ``lr``: a warm-up, then a linear decay to zero over the last third."""
        warm_up = (self.step + 1) / WARM_UP_STEPS
        decay = 3 * (self.num_steps - self.step) / self.num_steps
        return min(1.0, warm_up, max(0.0, decay))

    # ---- evaluation and files --------------------------------------------------------------------------------------

    def evaluate(self) -> str:
        """Exact answers of D2F on 40 problems of the training side that no batch is drawn from, in words."""
        self.export()
        chosen = itertools.islice(problems(EVALUATION_SEED, held_out=False, plain=True), 40)
        asked = [(problem.question, problem.result) for problem in chosen if problem.result is not None]
        outcome = evaluate(LLM(self.args.out), asked, decoding(0, 0.9))
        return f"d2f exact {outcome.accuracy:.0%}, tokens per forward {outcome.tpf:.2f}"

    def resume(self) -> None:
        """Goes on from the saved state, if there is one."""
        if not self.args.state.exists():
            return
        state = torch.load(self.args.state, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.generator.set_state(state["generator"])
        self.step = state["step"]
        self.batches = self._new_batches(plain=self.step < self.args.ar_steps)
        print(f"resumed at step {self.step}")

    def save(self) -> None:
        """Writes the state from which a run can go on, and the checkpoint."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "generator": self.generator.get_state(),
            "step": self.step,
        }
        self.args.state.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, self.args.state.with_suffix(".tmp"))
        self.args.state.with_suffix(".tmp").replace(self.args.state)
        self.export()

    def export(self) -> None:
        """Writes the checkpoint in Dream's layout: config.json, generation_config.json, model.safetensors.

        Weights are stored in bfloat16, half the size, and run in float32.
        """
        out: Path = self.args.out
        weights = {f"model.{name}": w.bfloat16().contiguous() for name, w in self.model.state_dict().items()}
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
        generation = {"eos_token_id": self.eos, "pad_token_id": self.eos, "mask_token_id": self.mask}
        config = {
            "architectures": ["DreamModel"],
            "model_type": "Dream",
            **GEOMETRY,
            "hidden_act": "silu",
            "torch_dtype": "float32",
            "mask_token_id": self.mask,
            "pad_token_id": self.eos,
            "bos_token_id": self.eos,
            "eos_token_id": self.eos,
        }
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def without_padding(mask: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """An attention mask [n, 1, s, s] in which only padding sees padding, from one [1, 1, s, s] for all."""
    is_padding = torch.arange(mask.shape[-1]) < tokens.padding[:, None]
    return (mask & ~is_padding[:, None, None, :]) | torch.eye(mask.shape[-1], dtype=torch.bool)
