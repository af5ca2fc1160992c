r"""Trains the bundled model from scratch on a CPU, and writes it as a Dream checkpoint.

    python -m scripts.train_demo                  overwrites the bundled model by one of 6,000 steps; hours on two cores
    python -m scripts.train_demo --out build/demo/model --state build/demo/try.pt --ar-steps 50 \
        --diffusion-steps 200                     a short try elsewhere; some minutes
    python -m scripts.train_demo --go-on --measure-steps 600 --ar-steps 0 --dtype bfloat16 --compile --seed 1 \
        --state build/demo/further.pt             trains the bundled model further and overwrites it; faster

The bundled model had many such runs (docs/bundled-model.md).

There are two stages, as in the training of Dream: an autoregressive warm-up on plain problems, from which the logits
are shifted by one position, and masked diffusion on whole conversations. Many of its batches are clean: they have many
problems, each with an answer to predict autoregressively and two blocks as decoding opens them, nearly or completely
masked. Most of the others are block-causal, with several answers after each prompt: two with different noise, and one
to predict autoregressively, which teaches arithmetic faster, because each of its positions can be predicted. Some steps
later the two noisy answers are trained on a second time. Positions that the model predicted rightly with high
probability are filled in by then, as decoding would have filled them. The remaining batches have full attention within
the window.

Problems of a template that the model solves are mostly left out. A run that goes on from a checkpoint does not know
yet which templates these are; with --measure-steps it finds them out before the first step.

The checkpoint has the mean of the weights over the last steps, which solves many more problems than the last weights.

No held-out problem is trained on: a hash of the question decides which ones these are. The file with 500 of them
(--held-out) is written only if it is missing. An existing one stays as it is, so that models are compared by the same
problems although the generator of problems changes.

Prints the loss, and from time to time the accuracy on 40 problems that are drawn like those of the training, with a
seed of their own. The state is saved to --state: started again, the same command goes on where the last one stopped.
Another run needs another file.
Everything is seeded: with --threads 1 two uninterrupted runs on one machine give the same weights. With more threads
sums may be ordered differently, so weights differ in their last bits, and after some steps in all of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from lopa_ascend.config.help import HelpFormatter
from lopa_ascend.demo import DEMO_MODEL, HELD_OUT
from scripts.arguments import number_from, positive, share
from scripts.demo_problems import problems

NUM_HELD_OUT = 500
HELD_OUT_SEED = 99


def write_held_out(path: Path, count: int) -> None:
    """Writes different held-out problems, one JSON object a line, unless the file exists."""
    if path.exists():
        return
    chosen: dict[str, dict[str, str]] = {}
    for problem in problems(HELD_OUT_SEED, held_out=True, plain=True):
        row = {"question": problem.question, "answer": problem.answer, "kind": problem.kind}
        chosen.setdefault(problem.question, row)
        if len(chosen) == count:
            break
    lines = (json.dumps(row) + "\n" for row in chosen.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.train_demo", description=__doc__, formatter_class=HelpFormatter
    )
    files = parser.add_argument_group("files")
    files.add_argument(
        "--out",
        type=Path,
        default=DEMO_MODEL,
        metavar="DIR",
        help="where the checkpoint goes (default: the bundled model)",
    )
    files.add_argument(
        "--held-out", type=Path, default=HELD_OUT, metavar="FILE",
        help="where the held-out problems go if this file does not exist yet (default: the bundled file)",
    )  # fmt: skip
    files.add_argument(
        "--state", type=Path, default=Path("build/demo/state.pt"), metavar="FILE",
        help="where a run can go on from (default: build/demo/state.pt)",
    )  # fmt: skip
    training = parser.add_argument_group("training")
    for name, kind, default, text in (
        (
            "--measure-steps",
            number_from(0),
            0,
            "batches to predict before the first step, to find what the model fails at",
        ),
        ("--ar-steps", number_from(0), 1000, "steps of the autoregressive warm-up"),
        ("--diffusion-steps", number_from(0), 5000, "steps of masked diffusion"),
        (
            "--batch",
            number_from(1),
            48,
            "problems in a step; three times as many in a clean one after the warm-up",
        ),
        ("--lr", positive, 3e-3, "highest learning rate"),
        ("--clean-share", share, 0.5, "share of the new batches after the warm-up that are clean"),
        ("--full-share", share, 0.12, "share of the new batches after the warm-up with full attention in the window"),
        ("--least-share", share, 0.15, "share of the problems kept of a template that the model solves; 1 keeps all"),
        ("--dropout", share, 0.0, "share of the channels that prompts go without in a step, against learning by heart"),
        (
            "--average-steps",
            number_from(1),
            500,
            "memory in steps of the running mean of the weights that the checkpoint has",
        ),
        ("--seed", number_from(0), 0, "seed of weights, problems and noise; another one draws other problems"),
        ("--threads", number_from(1), 2, "threads of torch"),
    ):
        training.add_argument(name, type=kind, default=default, metavar="N", help=f"{text} (default: {default})")
    training.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"),
        help="number format of matrix products; bfloat16 is faster where the processor has it (default: float32)",
    )  # fmt: skip
    training.add_argument(
        "--compile", action="store_true", help="compile what lies between the products; needs a C++ compiler"
    )
    training.add_argument(
        "--go-on", action="store_true",
        help="start with the weights in --out instead of random ones; if they have fewer than 12 layers, or fewer "
        "than 1,024 units in a feed-forward part, some are added that change nothing at first. If --state exists, it "
        "is used instead",
    )  # fmt: skip
    reports = parser.add_argument_group("reports, every N steps")
    for name, default, text in (
        ("--log-every", 50, "print the loss"),
        ("--save-every", 100, "save the state and the checkpoint"),
        ("--eval-every", 500, "print the accuracy"),
    ):
        reports.add_argument(
            name, type=number_from(1), default=default, metavar="N", help=f"{text} (default: {default})"
        )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    import torch  # takes seconds

    from lopa_ascend.backend.cpu import keep_freed_memory
    from scripts.demo_tokenizer import build, load
    from scripts.training.trainer import Trainer, read_state

    torch.set_num_threads(args.threads)
    keep_freed_memory()  # without it a quarter of the time went into page faults
    state = read_state(args)
    goes_on = args.go_on or state is not None
    if goes_on and not (args.out / "vocab.json").exists():
        raise SystemExit(f"{args.out} has no vocab.json: a run that goes on needs the checkpoint of the one before it")
    trainer = Trainer(args, load(args.out) if goes_on else build(args.out))
    if state is not None:
        trainer.resume(state)
    write_held_out(args.held_out, NUM_HELD_OUT)
    trainer.run()


if __name__ == "__main__":
    main()
