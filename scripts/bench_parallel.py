"""What ranks send each other, against formulas; and how the work of a step divides among branch-parallel ranks.

    python -m scripts.bench_parallel traffic                            the bundled model, tp 2 x bp 2
    python -m scripts.bench_parallel traffic --window full --model DIR
    python -m scripts.bench_parallel scaling --plot F                   a random model, two minutes

traffic: the ranks decode held-out problems together, as a server does; what a rank sends in a step is set beside a
formula of what the step was about, exactly, and beside an upper bound. With s the bytes of a number:

  layers      2 (layers - 1) tokens x hidden x s, and in the last layer 2 x hidden x s for each row of which anything is
              wanted; at most 2 x layers x tokens x hidden x s
  embedding   tokens x hidden x s
  vocabulary  a few float32 a predicted position: of each shard the best token, its logit and the softmax's sums
  branches    12 bytes a masked position of the group that has most of them; at most, with control and agreement,
              12 x positions of active blocks x local slots + 256
  kv          0 with block-causal windows; with full ones the committed positions' keys and values and one hidden state
  control     8 bytes, and what arrives from outside
  agreement   32 bytes each agreement_interval steps

The published engine gathers the whole logits of all branches at all positions of the window instead, 2 bytes a logit,
and every rank receives them all; steps with one branch it makes on one rank.

scaling: one decode with four branches by 1, 2 and 4 ranks of one thread, no positions shared between branches, of a
random Dream of 125 M parameters (bench_decode's). Times are CPU seconds. "Scaling" is what one rank spends, with all
its threads, over (bp x what the busiest of bp ranks spends), the median of the repetitions; 1 is the ideal. One rank is
measured alone, while the others wait, and side by side with others that do the same: neighbours share caches and
memory, and spend more whatever they compute. A rank's main thread computes everything and sleeps while it waits for
others, so its CPU time has no waiting in it; what the other threads spend meanwhile is measured as well. "rest" is the
host's work of a step (plan, layout, policy) without the exchange.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import mean, median

import torch

from lopa_ascend import DecodingParams, checkpoint
from lopa_ascend.config import WINDOW_ATTENTIONS, EngineConfig, ModelConfig
from lopa_ascend.demo import DEMO_MODEL, HELD_OUT
from lopa_ascend.kv.pages import PAGE_SIZE, slots_for
from lopa_ascend.kv.pool import KVPool
from lopa_ascend.parallel.placement import Placement
from lopa_ascend.text.prompt import Prompts
from lopa_ascend.text.tokenizer_files import load_tokenizer
from scripts.bench_decode import WORKLOAD, write_model
from scripts.bench_ranks import Decode, RankTimes, ScalingJob, Step, TrafficJob, run

DREAM_7B = ModelConfig(
    vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_layers=28, num_heads=28, num_kv_heads=4,
    head_dim=128, max_position_embeddings=131072, rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=False,
    attention_bias=True, mask_token_id=151666, eos_token_ids=(), dtype="bfloat16",
)  # fmt: skip
PURPOSES = ("layers", "embedding", "vocabulary", "branches", "kv", "control", "agreement")
BRANCH_PARALLEL = ("branches", "control", "agreement")
WANTED_SCALING = 0.85


# ---- traffic -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Formulas:
    """Bytes that a rank of tp x bp sends for a step."""

    model: ModelConfig
    dtype: torch.dtype
    tp: int
    bp: int

    def exact(self, step: Step) -> dict[str, int]:
        """By purpose; "control" and "agreement" by their calls, without what arrived from outside."""
        c, s = self.model, self.dtype.itemsize
        sent = dict.fromkeys(PURPOSES, 0)
        if self.tp > 1:
            sent["layers"] = 2 * s * c.hidden_size * ((c.num_layers - 1) * step.tokens + step.rows)
            sent["embedding"] = s * c.hidden_size * step.tokens
            sent["vocabulary"] = sum(4 * rows * columns for rows, columns in step.scored)
        if self.bp > 1:
            placement, masked = Placement(self.bp), [0] * self.bp
            for plan in step.plans:
                for branch, row in enumerate(plan.rows):
                    masked[placement.home(branch)[0]] += len(row.masked)
                if placement.sends_values(plan):
                    sent["kv"] += plan.num_new * self.kv_position + s * c.hidden_size
            sent["branches"] = 12 * max(masked)
        sent["control"] = 8 * step.sent("control").calls
        sent["agreement"] = 32 * step.sent("agreement").calls
        return sent

    @property
    def kv_position(self) -> int:
        """Bytes of one position's keys and values on one rank."""
        return KVPool.page_bytes(self.model.kv_shape(self.tp), self.dtype) // PAGE_SIZE

    def layers_at_most(self, step: Step) -> int:
        c = self.model
        return 2 * c.num_layers * step.tokens * c.hidden_size * self.dtype.itemsize if self.tp > 1 else 0

    def branches_at_most(self, step: Step) -> int:
        """Of branches, control and agreement together, without what arrived from outside."""
        placement, positions = Placement(self.bp), 0
        for plan in step.plans:
            active = max(row.end for row in plan.rows) - plan.start - plan.num_new
            positions += active * slots_for(len(plan.rows), placement.size)
        return 12 * positions + 256

    def logits(self, step: Step) -> int:
        """What each rank receives where whole logits are gathered, its own included."""
        positions = sum(len(row.tokens) for plan in step.plans if len(plan.rows) > 1 for row in plan.rows)
        return 2 * self.model.vocab_size * positions if self.bp > 1 else 0


def arrived(step: Step) -> bool:
    """Whether rank 0 had something to say."""
    control = step.sent("control")
    return control.num_bytes > 8 * control.calls


def faults(formulas: Formulas, steps: Sequence[Step]) -> list[str]:
    """Which steps' traffic is not what the formulas say."""
    found = []
    for index, step in enumerate(steps):
        exact = formulas.exact(step)
        sent = {purpose: step.sent(purpose).num_bytes for purpose in PURPOSES}
        if arrived(step):
            sent["control"] = exact["control"]
        found += [f"step {index}: {sent[p]} bytes of {p}, not {exact[p]}" for p in PURPOSES if sent[p] != exact[p]]
        found += [f"step {index}: {t.num_bytes} bytes of {t.purpose}" for t in step.traffic if t.purpose not in sent]
        if sent["layers"] > formulas.layers_at_most(step):
            found.append(f"step {index}: {sent['layers']} bytes of layers")
        if sum(sent[purpose] for purpose in BRANCH_PARALLEL) > formulas.branches_at_most(step):
            found.append(f"step {index}: {sent} is more than {formulas.branches_at_most(step)} bytes for branches")
    return found


def prompts(model: Path, count: int) -> list[list[int]]:
    """The first held-out problems as chat prompts."""
    config = checkpoint.open_checkpoint(model).config
    encoder = Prompts(load_tokenizer(model, config.vocab_size), config.vocab_size, config.mask_token_id, model.name)
    with HELD_OUT.open(encoding="utf-8") as lines:
        questions = [json.loads(line)["question"] for line in islice(lines, count)]
    return [encoder.encode_chat([{"role": "user", "content": question}]) for question in questions]


def report_traffic(formulas: Formulas, ranks: Sequence[Sequence[Step]]) -> None:
    steps = [step for rank in ranks for step in rank]
    large = replace(formulas, model=DREAM_7B, dtype=torch.bfloat16)
    exact, scaled = ([f.exact(step) for step in steps] for f in (formulas, large))
    limits = {"layers": formulas.layers_at_most, "branches": formulas.branches_at_most}
    print("Bytes that a rank sends in a step, the mean of all ranks and steps:\n")
    print("| purpose | calls | bytes | formula | at most | Dream-7B, bfloat16 |\n|---|---|---|---|---|---|")
    for purpose in PURPOSES:
        sent = [step.sent(purpose) for step in steps]
        cells = [f"{mean(traffic.calls for traffic in sent):.2f}", f"{mean(t.num_bytes for t in sent):,.1f}"]
        cells.append(f"{mean(numbers[purpose] for numbers in exact):,.1f}")
        cells.append(f"{mean(map(limits[purpose], steps)):,.1f}" if purpose in limits else "")
        cells.append(f"{mean(numbers[purpose] for numbers in scaled):,.1f}")
        print(f"| {purpose} | {' | '.join(cells)} |")
    print("\nBytes that a rank receives in a step, its own included, to know what all branches predict:\n")
    print("| model | vocabulary | branches | whole logits, as published | times |\n|---|---|---|---|---|")
    ours = formulas.bp * mean(step.sent("branches").num_bytes for step in steps)
    for name, f in (("this one", formulas), ("Dream-7B", large)):
        theirs = mean(map(f.logits, steps))
        times = f"{theirs / ours:,.0f}" if ours else ""
        print(f"| {name} | {f.model.vocab_size:,} | {ours:,.1f} | {theirs:,.1f} | {times} |")


def traffic(args: argparse.Namespace) -> int:
    if args.tp * args.bp == 1:
        sys.exit("one rank sends nothing: choose a larger --tp or --bp")
    config = EngineConfig(
        model=str(args.model),
        dtype=args.dtype,
        tensor_parallel_size=args.tp,
        branch_parallel_size=args.bp,
        enable_prefix_caching=False,
        max_num_seqs=args.max_num_seqs,
        threads=1,
    )
    params = DecodingParams(
        num_branches=args.num_branches, max_new_tokens=args.max_tokens, window_attention=args.window
    )
    requests = [(prompt, params) for prompt in prompts(args.model, args.problems)]
    ranks: list[list[Step]] = run(TrafficJob(config, requests), list[Step])
    model = checkpoint.open_checkpoint(args.model).config
    formulas = Formulas(model, getattr(torch, args.dtype), args.tp, args.bp)
    steps = [step for rank in ranks for step in rank]
    told = [step.sent("control").num_bytes for step in ranks[0] if arrived(step)]
    print(
        f"tp {args.tp} x bp {args.bp}, k = {args.num_branches}, {args.window} windows, {args.dtype}: {args.problems} "
        f"problems in {len(ranks[0])} steps, {len(told)} of which told the ranks of them ({sum(told):,} bytes).\n"
    )
    report_traffic(formulas, ranks)
    found = faults(formulas, steps)
    print(f"\n{len(steps)} steps of ranks, {len(found)} with other bytes than the formula's or more than allowed")
    print("\n".join(found))
    return bool(found)


# ---- scaling -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """``decodes`` [repetitions][ranks] of one way to decode with ``bp`` ranks. A ``part`` is a time in Decode."""

    name: str
    bp: int
    decodes: list[tuple[Decode, ...]]

    def seconds(self, part: str) -> float:
        """The mean of the ranks; the median of the repetitions."""
        return median(mean(getattr(decode, part) for decode in ranks) for ranks in self.decodes)

    def milliseconds(self, part: str) -> float:
        """The same in a step."""
        return 1000 * self.seconds(part) / self.decodes[0][0].num_steps

    def scaling(self, one: Point, part: str) -> float:
        """The time of ``one`` rank (side by side: their mean) over ``bp`` times that of the busiest; the median of the
        repetitions."""
        return median(
            mean(getattr(decode, part) for decode in single) / (self.bp * max(getattr(d, part) for d in ranks))
            for single, ranks in zip(one.decodes, self.decodes, strict=True)
        )

    def row(self) -> str:
        parts = ("forward", "scores", "exchange", "rest", "host", "other_threads")
        numbers = self.seconds("total"), *map(self.milliseconds, parts)
        return f"| {self.name} | {' | '.join(f'{number:.2f}' for number in numbers)} |"


def points(two: Sequence[RankTimes], four: Sequence[RankTimes]) -> list[Point]:
    """One rank alone, two side by side; and the branch-parallel ones."""
    return [
        Point("1, alone", 1, [(decode,) for decode in two[0].alone]),
        Point("1, side by side", 1, list(zip(*(times.side_by_side for times in two), strict=True))),
        Point("2", 2, list(zip(*(times.together for times in two), strict=True))),
        Point("4", 4, list(zip(*(times.together for times in four), strict=True))),
    ]


def scaling(args: argparse.Namespace) -> int:
    work = json.loads(WORKLOAD.read_text())
    if not (args.model / "config.json").exists():
        write_model(args.model, work)
    generator = torch.Generator().manual_seed(work["prompt_seed"])
    prompt = torch.randint(0, work["prompt_vocab"], (32,), generator=generator).tolist()
    params = DecodingParams(
        num_branches=3, block_size=64, tau_conf=0.7, max_new_tokens=args.max_tokens, confidence="neg_entropy",
        finish_at_eos=False, ignore_eos=True,
    )  # fmt: skip
    ranks: list[list[RankTimes]] = []
    for size in (2, 4):
        config = EngineConfig(
            model=str(args.model),
            dtype="float32",
            branch_parallel_size=size,
            enable_prefix_caching=False,
            max_num_seqs=1,
            max_model_len=len(prompt) + args.max_tokens,
            threads=1,
        )
        ranks.append(run(ScalingJob(config, prompt, params, args.repetitions, size == 2), RankTimes))
    found = points(*ranks)
    if len({decode.token_ids for point in found for several in point.decodes for decode in several}) != 1:
        print("the decodes have given different tokens")
        return 1
    print("CPU time of a rank, their mean: seconds of the decode, and milliseconds a step of its parts:\n")
    print("| ranks | decode, s | forward | head, scores | exchange | rest | host: both | other threads |")
    print("|---|---|---|---|---|---|---|---|\n" + "\n".join(point.row() for point in found))
    waits = [wait for times in ranks[0] for wait in times.waits]
    share = sum(wait.cpu for wait in waits) / sum(wait.wall for wait in waits)
    print(f"\nA rank that waits for another spends {share:.2%} of a core, of all threads.\n")
    print("| ranks | scaling | of main threads | side by side |\n|---|---|---|---|")
    alone, beside, *several = found
    for point in several:
        values = point.scaling(alone, "total"), point.scaling(alone, "main_thread"), point.scaling(beside, "total")
        print(f"| {point.name} | {' | '.join(f'{value:.3f}' for value in values)} |")
    print(f"\n2 ranks, wanted at least {WANTED_SCALING}: {several[0].scaling(alone, 'total'):.3f}")
    if args.plot:
        draw(found, args.plot)
    return 0


def draw(found: Sequence[Point], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    names = [point.name for point in found]
    for axis, parts, value in (
        (axes[0], {"forward": "forward", "scores": "head, scores", "host": "host"}, Point.seconds),
        (axes[1], {"rest": "planning, layout, policy", "exchange": "exchange"}, Point.milliseconds),
    ):
        bottom = [0.0] * len(found)
        for part, label in parts.items():
            heights = [value(point, part) for point in found]
            axis.bar(names, heights, bottom=bottom, label=label)
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    ideal = [found[0].seconds("total") / point.bp for point in found]
    axes[0].plot(names, ideal, "k_", markersize=30, label="1 alone / ranks")
    axes[0].set(ylabel="CPU seconds of a rank", xlabel="branch-parallel ranks")
    axes[1].set(ylabel="host work a step, CPU ms", xlabel="branch-parallel ranks")
    for axis in axes:
        axis.grid(alpha=0.3, axis="y")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True, metavar="{traffic,scaling}")
    sent = kinds.add_parser("traffic", help="bytes between ranks against formulas and the published engine")
    sent.set_defaults(report=traffic)
    sent.add_argument("--tp", type=int, default=2, help="ranks that split each forward pass (default: 2)")
    sent.add_argument("--bp", type=int, default=2, help="groups of them that take different branches (default: 2)")
    sent.add_argument("--model", type=Path, default=DEMO_MODEL, help="Dream directory with a chat template")
    sent.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="(default: float32)")
    sent.add_argument("--num-branches", type=int, default=3, help="the paper's k (default: 3)")
    sent.add_argument("--window", default="block_causal", choices=WINDOW_ATTENTIONS, help="(default: block_causal)")
    sent.add_argument("--problems", type=int, default=32, help="held-out problems (default: 32)")
    sent.add_argument("--max-num-seqs", type=int, default=4, help="so many at a time (default: 4)")
    sent.add_argument("--max-tokens", type=int, default=128, help="of an answer (default: 128)")
    times = kinds.add_parser("scaling", help="CPU seconds of 1, 2 and 4 branch-parallel ranks")
    times.set_defaults(report=scaling)
    times.add_argument("--model", type=Path, default=Path("build/bench-model"), help="where the random model is kept")
    times.add_argument("--max-tokens", type=int, default=128, help="of the decode (default: 128)")
    times.add_argument("--repetitions", type=int, default=3, help="of each way to decode (default: 3)")
    times.add_argument("--plot", type=Path, help="write the tables as a picture")
    args = parser.parse_args()
    sys.exit(args.report(args))


if __name__ == "__main__":
    main()
