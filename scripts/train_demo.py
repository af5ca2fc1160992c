"""Trains the bundled model from scratch on a CPU and writes it as a Dream checkpoint.

    python -m scripts.train_demo --out lopa_ascend/demo/model

Two stages, as Dream itself had them: an autoregressive warm-up (hence the logits shifted by one), then masked
diffusion with D2F's block-wise monotone noise; most batches are block-causal, the others attend fully within a window.
The run is resumable (``--state``): started again, it goes on where the last checkpoint was written. Everything is
seeded; with ``--threads 1`` two runs on one machine give the same weights, with more threads sums may be
ordered differently and weights differ in their last bits, and with that in everything.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2Model

from lopa_ascend import LLM
from lopa_ascend.backend.cpu import keep_freed_memory
from scripts.demo_problems import problems
from scripts.demo_tokenizer import ASSISTANT, EOS, MASK, USER, build
from scripts.eval_demo import decoding, evaluate

BLOCK = 32
ANSWER = 4 * BLOCK
GEOMETRY: dict[str, Any] = {
    "vocab_size": 768, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "attention_dropout": 0.0,
}  # fmt: skip


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz (Jordan et al. 2024), for matrices, batched by shape, in float32.

    torch.optim.Muon does the same in bfloat16 one matrix at a time, several times slower on CPUs without bf16 units.
    """

    def __init__(self, params: list[torch.nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.01):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for p in group["params"]:
                shapes.setdefault(p.shape, []).append(p)
            for params in shapes.values():
                updates = []
                for p in params:
                    state = self.state[p]
                    buf = state.setdefault("momentum", torch.zeros_like(p))
                    assert p.grad is not None
                    buf.lerp_(p.grad, 1 - group["momentum"])
                    updates.append(p.grad.lerp(buf, group["momentum"]))
                step = orthogonalise(torch.stack(updates))
                scale = 0.2 * math.sqrt(max(step.shape[-2:]))
                for p, u in zip(params, step, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(u, alpha=-group["lr"] * scale)


def orthogonalise(g: torch.Tensor) -> torch.Tensor:
    """Five Newton-Schulz steps towards the nearest semi-orthogonal matrix of each g [n, rows, cols]."""
    tall = g.shape[1] > g.shape[2]
    x = g.mT if tall else g
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for a, b, c in ((3.4445, -4.7750, 2.0315),) * 5:
        xx = x @ x.mT
        x = a * x + (b * xx + c * xx @ xx) @ x
    return x.mT if tall else x


class Problems:
    """Endless batches (prompt ids [n, p], answer ids [n, 128]) of equal prompt length, answers padded with EOS."""

    def __init__(self, tokenizer: Tokenizer, seed: int):
        self.tokenizer = tokenizer
        self.source = problems(seed, held_out=False)
        self.eos = tokenizer.get_vocab()[EOS]
        self.waiting: dict[int, list[tuple[list[int], list[int]]]] = {}

    def next(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        for problem in self.source:
            prompt = self.tokenizer.encode(USER + problem.question + ASSISTANT).ids
            answer = self.tokenizer.encode(problem.answer).ids
            same = self.waiting.setdefault(len(prompt), [])
            same.append((prompt, answer + [self.eos] * (ANSWER - len(answer))))
            if len(same) == n:
                del self.waiting[len(prompt)]
                return torch.tensor([p for p, _ in same]), torch.tensor([a for _, a in same])
        raise AssertionError("problems() never ends")


def block_causal(prompt: int, blocks: int) -> torch.Tensor:
    """[1, 1, s, s] bool: the prompt sees itself, a block sees the prompt, the blocks before it and itself."""
    block = torch.cat([torch.zeros(prompt, dtype=torch.long), torch.arange(blocks).repeat_interleave(BLOCK) + 1])
    return (block[:, None] >= block[None, :])[None, None]


def prefix_causal(prompt: int) -> torch.Tensor:
    """[1, 1, s, s] bool: the prompt sees itself both ways, the answer is causal."""
    mask = torch.ones(prompt + ANSWER, prompt + ANSWER, dtype=torch.bool).tril()
    mask[:prompt, :prompt] = True
    return mask[None, None]


def blockwise_noise(content: torch.Tensor, gen: torch.Generator) -> torch.Tensor:
    """Masked share [n, 128] of each position: blocks before a random one are clean, and from there on the share rises
    from block to block (D2F's monotone noise). ``content`` [n] counts tokens up to the first EOS."""
    n, blocks = content.shape[0], ANSWER // BLOCK
    front = (torch.rand(n, generator=gen) * (content // BLOCK + 1).clamp(max=blocks)).long()
    share = torch.zeros(n, blocks)
    level = torch.rand(n, generator=gen) * 1.1  # a tenth of the front blocks are masked in full
    for b in range(blocks):
        share[:, b] = torch.where(b >= front, level, 0.0)
        rise = (1.05 - level).clamp(min=0) * torch.rand(n, generator=gen)
        level = torch.where(b >= front, level + rise, level)
    return share.repeat_interleave(BLOCK, dim=1)


def ramp_noise(content: torch.Tensor, gen: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Masked share [n, 128] that rises from 0 to 1 around a random position, and where that ramp ends [n, 1].

    This is what decoding meets: confidence fills from the left, with gaps. Between a step (autoregressive) and a ramp
    two blocks wide.
    """
    n = content.shape[0]
    centre = torch.rand(n, generator=gen) * (content + 1)
    width = 1 + 2 * BLOCK * torch.rand(n, generator=gen) ** 2
    share = (torch.arange(ANSWER) - centre[:, None]) / width[:, None] + 0.5
    return share.clamp(0, 1), (centre + width / 2)[:, None]


def noise(answer: torch.Tensor, eos: int, gen: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(mask [n, 128], weight of each position in the loss). A quarter of the batch has block-wise noise, the others a
    ramp; what lies far behind a ramp is mostly guesswork and weighs less."""
    content = (answer != eos).sum(1) + 1
    share, end = ramp_noise(content, gen)
    blockwise = torch.rand(len(answer), 1, generator=gen) < 0.25
    share = torch.where(blockwise, blockwise_noise(content, gen), share)
    far = ~blockwise & (torch.arange(ANSWER) > end + 20)
    return torch.rand(share.shape, generator=gen) < share, torch.where(far, 0.2, 1.0)


@dataclass
class Batch:
    """``ids`` [n, s]: prompt and noisy answer. The ``wanted`` [n, a] positions of ``answer`` [n, a] are predicted."""

    ids: torch.Tensor
    mask: torch.Tensor | None
    prompt: int
    wanted: torch.Tensor
    answer: torch.Tensor
    weight: torch.Tensor


class Trainer:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.tokenizer = build(args.out)
        self.eos, self.mask = (self.tokenizer.get_vocab()[token] for token in (EOS, MASK))
        torch.manual_seed(args.seed)
        self.model = Qwen2Model(Qwen2Config(**GEOMETRY))
        for name, p in self.model.named_parameters():
            if p.dim() == 2:
                torch.nn.init.normal_(p, std=0.02 if "embed" in name else p.shape[1] ** -0.5)
        matrices = [p for n, p in self.model.named_parameters() if p.dim() == 2 and "embed" not in n]
        rest = [p for n, p in self.model.named_parameters() if p.dim() != 2 or "embed" in n]
        self.optimizers = [
            Muon(matrices, args.lr),
            torch.optim.AdamW(rest, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.batches = Problems(self.tokenizer, args.seed + 1)
        self.gen = torch.Generator().manual_seed(args.seed + 2)
        self.step = 0

    def loss(self, batch: Batch) -> torch.Tensor:
        """Weighted mean cross entropy of the wanted positions; the row of q - 1 predicts position q."""
        row, column = batch.wanted.nonzero(as_tuple=True)
        mask = {"full_attention": batch.mask}
        hidden = self.model(batch.ids, attention_mask=mask, use_cache=False).last_hidden_state
        logits = F.linear(hidden[row, batch.prompt + column - 1], self.model.embed_tokens.weight)
        losses = F.cross_entropy(logits, batch.answer[batch.wanted], reduction="none")
        weight = batch.weight[batch.wanted]
        return (losses * weight).sum() / weight.sum()

    def rates(self) -> float:
        """Warm-up of 100 steps at the start, linear decay to zero over the last third."""
        total = self.args.ar_steps + self.args.diffusion_steps
        return min(1.0, (self.step + 1) / 100, max(0.0, 3 * (total - self.step) / total))

    def ar_batch(self) -> Batch:
        prompt, answer = self.batches.next(self.args.batch)
        wanted = torch.arange(ANSWER) <= answer.ne(self.eos).sum(1, keepdim=True)  # up to the first EOS
        ids, p = torch.cat([prompt, answer], 1), prompt.shape[1]
        return Batch(ids, prefix_causal(p), p, wanted, answer, torch.ones(answer.shape))

    def diffusion_batch(self) -> Batch:
        prompt, answer = self.batches.next(self.args.batch)
        masked, weight = noise(answer, self.eos, self.gen)
        noisy = torch.where(masked, self.mask, answer)
        p, mask, blocks = prompt.shape[1], None, ANSWER // BLOCK
        if torch.rand((), generator=self.gen) < self.args.full_share:
            blocks = 1 + int(torch.randint(blocks, (), generator=self.gen))
        else:
            mask = block_causal(p, blocks)
        end = blocks * BLOCK
        ids = torch.cat([prompt, noisy[:, :end]], 1)
        return Batch(ids, mask, p, masked[:, :end], answer[:, :end], weight[:, :end])

    def train_step(self) -> float:
        batch = self.ar_batch() if self.step < self.args.ar_steps else self.diffusion_batch()
        if not batch.wanted.any():
            return math.nan
        loss = self.loss(batch)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = self.args.lr * self.rates()
            optimizer.step()
        return float(loss.detach())

    def run(self) -> None:
        self.resume()
        total = self.args.ar_steps + self.args.diffusion_steps
        recent: list[float] = []
        for done in tqdm(range(self.step + 1, total + 1), initial=self.step, total=total, mininterval=30):
            recent.append(self.train_step())
            self.step = done
            if done % self.args.log_every == 0:
                good = [x for x in recent if x == x]
                tqdm.write(f"step {done} loss {sum(good) / max(1, len(good)):.4f} at {time.strftime('%H:%M:%S')}")
                recent.clear()
            if done % self.args.save_every == 0 or done == total:
                self.save(done)
            if done > self.args.ar_steps and (done % self.args.eval_every == 0 or done == total):
                tqdm.write(f"step {done} {self.evaluate()}")

    def evaluate(self) -> str:
        """Exact answers of d2f on a few problems of the training side that no batch was drawn from."""
        self.export()
        chosen = itertools.islice(problems(12345, held_out=False), 40)
        found = evaluate(LLM(self.args.out), [(p.question, p.result) for p in chosen], decoding(0, 0.9))
        return f"d2f exact {found.accuracy:.0%}, tokens per forward {found.tpf:.2f}"

    def resume(self) -> None:
        if not self.args.state.exists():
            return
        state = torch.load(self.args.state, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.gen.set_state(state["generator"])
        self.step = state["step"]
        self.batches = Problems(self.tokenizer, self.args.seed + 1 + self.step)
        print(f"resumed at step {self.step}")

    def save(self, step: int) -> None:
        state = {"model": self.model.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers],
                 "generator": self.gen.get_state(), "step": step}  # fmt: skip
        self.args.state.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, self.args.state.with_suffix(".tmp"))
        self.args.state.with_suffix(".tmp").replace(self.args.state)
        self.export()

    def export(self) -> None:
        """The checkpoint in Dream's layout: config.json, generation_config.json, model.safetensors.

        Weights are stored in bfloat16, half the size, and run in float32.
        """
        out: Path = self.args.out
        weights = {f"model.{k}": v.bfloat16().contiguous() for k, v in self.model.state_dict().items()}
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
        config = {"architectures": ["DreamModel"], "model_type": "Dream", **GEOMETRY, "hidden_act": "silu",
                  "torch_dtype": "float32", "mask_token_id": self.mask, "pad_token_id": self.eos,
                  "bos_token_id": self.eos, "eos_token_id": self.eos}  # fmt: skip
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        generation = {"eos_token_id": self.eos, "pad_token_id": self.eos, "mask_token_id": self.mask}
        (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def write_held_out(path: Path, n: int, seed: int) -> None:
    chosen: dict[str, str] = {}
    for problem in problems(seed, held_out=True):
        chosen.setdefault(problem.question, problem.answer)
        if len(chosen) == n:
            break
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in chosen.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("lopa_ascend/demo/model"), help="where the checkpoint goes")
    parser.add_argument("--held-out", type=Path, default=Path("lopa_ascend/demo/heldout.jsonl"))
    parser.add_argument("--state", type=Path, default=Path("build/demo/state.pt"), help="where to resume from")
    parser.add_argument("--ar-steps", type=int, default=350)
    parser.add_argument("--diffusion-steps", type=int, default=6500)
    parser.add_argument("--batch", type=int, default=24, help="problems a step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument(
        "--full-share", type=float, default=0.25, help="share of batches with full attention in the window"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--eval-every", type=int, default=500)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()  # without it a quarter of the time went into page faults
    write_held_out(args.held_out, 500, seed=args.seed + 99)
    Trainer(args).run()


if __name__ == "__main__":
    main()
