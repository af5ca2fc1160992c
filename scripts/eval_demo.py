"""Measures accuracy and tokens per forward pass (TPF) of the bundled model on its held-out problems.

    python -m scripts.eval_demo targets                 exact and TPF of the usual ways to decode, on 500 problems
    python -m scripts.eval_demo table --plot demo.png   branches by tau_conf by window attention, on 200 problems
    python -m scripts.eval_demo blocks                  the same by block size and branches, on 500 problems
    python -m scripts.eval_demo kinds                   exact by kind and steps, also where others worded them
    python -m scripts.eval_demo typed                   exact with a system prompt, in a second turn, without "?" ...
    python -m scripts.eval_demo choose --model DIR      exact with d2f, to choose between checkpoints
    python -m scripts.eval_demo ways                    what other ways to decode would gain, on 500 problems
    python -m scripts.eval_demo prefix                  what approximate prefix caching does to answers, on 50 problems

"exact" is the share of answers that end in the right number. TPF is visible tokens divided by forward passes, of all
problems together. `table` is a small version of the paper's Figure 4: each cell has exact and TPF. All take minutes on
two cores, and answer sooner with a smaller --limit.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from lopa_ascend.config import DecodingParams, recommended_decoding
from lopa_ascend.config.help import HelpFormatter
from lopa_ascend.demo import DEMO_MODEL, HANDWRITTEN, HELD_OUT, INDEPENDENT
from lopa_ascend.types import GenerationOutput
from scripts.arguments import number_from, picture
from scripts.demo_problems import parse_result
from scripts.demo_sets import Conversation, asked, going_on, other_held_out, read, read_set, typed_ways, unseen

if TYPE_CHECKING:
    from lopa_ascend import LLM

DEFAULT_LIMITS = {
    "targets": 500,
    "table": 200,
    "blocks": 500,
    "kinds": 500,
    "typed": 200,
    "choose": 2000,
    "ways": 500,
    "prefix": 50,
}
"""Problems, by what is measured."""
BRANCHES = (0, 1, 3, 7)
"""Lookahead branches, the paper's k; 0 is D2F."""
TAUS = (0.95, 0.9, 0.8, 0.7)
"""Values of tau_conf."""
BLOCK_SIZES = (4, 8, 16, 32)
WINDOWS = ("block_causal", "full")
HIGHEST_START = 70
"""The axis of exact answers begins at this percentage or lower, so that one problem more does not look like much."""


@dataclass(frozen=True)
class Outcome:
    """What came of decoding some problems."""

    accuracy: float
    """Share of exact answers."""
    tpf: float
    """Visible tokens divided by forward passes."""
    model_tokens: float
    """Tokens computed in a forward pass."""


def decoding(num_branches: int, tau_conf: float, window: str = "block_causal") -> DecodingParams:
    """LoPA, or D2F without branches, as the bundled model recommends, with answers of at most 192 tokens."""
    fields = {
        **recommended_decoding(DEMO_MODEL),
        "decoding": "lopa" if num_branches else "d2f",
        "num_branches": num_branches,
        "tau_conf": tau_conf,
        "window_attention": window,
        "max_new_tokens": 192,
    }
    return DecodingParams(**fields)


def solved(outputs: Sequence[GenerationOutput], results: Sequence[int]) -> list[bool]:
    """Whether each answer ends in the right number."""
    return [parse_result(output.text or "") == result for output, result in zip(outputs, results, strict=True)]


def share_of_exact(outputs: Sequence[GenerationOutput], problems: Sequence[tuple[str, int]]) -> float:
    exact = solved(outputs, [result for _, result in problems])
    return sum(exact) / len(exact)


def evaluate(llm: LLM, problems: list[tuple[str, int]], params: DecodingParams, *, quiet: bool = True) -> Outcome:
    """Decodes problems together.

    Args:
        llm: the model.
        problems: questions and results.
        params: of every request.
        quiet: no progress bar.
    """
    outputs = llm.chat([asked(question) for question, _ in problems], params, quiet=quiet)
    num_forwards = sum(output.num_forwards for output in outputs)
    num_generated = sum(len(output.token_ids) for output in outputs)
    model_tokens = sum(output.model_tokens for output in outputs)
    return Outcome(share_of_exact(outputs, problems), num_generated / num_forwards, model_tokens / num_forwards)


def targets(llm: LLM, limit: int) -> None:
    """Prints exact and TPF of the usual ways to decode."""
    outcomes = measure(
        llm,
        limit,
        {
            "d2f, one token a pass": replace(decoding(0, 1.0), tau_add=1.0, tau_act=1.0),
            "d2f, tau_conf 0.9": decoding(0, 0.9),
            "lopa, k = 3": decoding(3, 0.9),
            "lopa, k = 7": decoding(7, 0.9),
        },
    )
    d2f, lopa = outcomes["d2f, tau_conf 0.9"], outcomes["lopa, k = 7"]
    points = 100 * (lopa.accuracy - d2f.accuracy)
    print(f"lopa over d2f: {lopa.tpf / d2f.tpf:.2f} times the TPF, {points:+.1f} points")


def ways(llm: LLM, limit: int) -> None:
    """Prints exact and TPF of ways to decode that are more cautious, or bolder, than the recommended one."""
    d2f, lopa = decoding(0, 0.9), decoding(7, 0.9)
    measure(
        llm,
        limit,
        {
            "d2f": d2f,
            "left to right, one token a pass": replace(d2f, block_size=1, tau_add=1.0, tau_act=1.0, tau_conf=1.0),
            "d2f, tau_add 1": replace(d2f, tau_add=1.0),
            "d2f, tau_conf 0.95": decoding(0, 0.95),
            "d2f, tau_add 0.5": replace(d2f, tau_add=0.5),
            "d2f, acceptance_factor 0.5": replace(d2f, acceptance="factor", acceptance_factor=0.5),
            "lopa, k = 7": lopa,
            "lopa, k = 7, tau_add 0.5": replace(lopa, tau_add=0.5),
        },
    )


def measure(llm: LLM, limit: int, runs: dict[str, DecodingParams]) -> dict[str, Outcome]:
    """Decodes held-out problems in several ways, and prints a line of each.

    Args:
        llm: the model.
        limit: number of problems.
        runs: parameters, by the name that is printed.
    """
    problems = read(limit)
    outcomes = {}
    for name, params in runs.items():
        outcomes[name] = outcome = evaluate(llm, problems, params, quiet=False)
        print(f"{name:31s} exact {outcome.accuracy:6.1%}  TPF {outcome.tpf:5.2f}", flush=True)
    return outcomes


def table(llm: LLM, limit: int, block_size: int | None, plot: Path | None) -> None:
    """Prints exact and TPF by window attention, lookahead branches and tau_conf.

    Args:
        llm: the model.
        limit: number of problems.
        block_size: None for the recommended one.
        plot: file of a picture of the table.
    """
    problems = read(limit)
    size = decoding(0, 0.9).block_size if block_size is None else block_size
    outcomes: dict[tuple[str, int, float], Outcome] = {}
    print(f"| window | k | {' | '.join(f'tau_conf {tau}' for tau in TAUS)} |")
    print(f"|---|---|{'---|' * len(TAUS)}")
    with tqdm(total=len(WINDOWS) * len(BRANCHES) * len(TAUS), disable=None) as bar:
        for window in WINDOWS:
            for k in BRANCHES:
                for tau in TAUS:
                    params = replace(decoding(k, tau, window), block_size=size)
                    outcomes[window, k, tau] = evaluate(llm, problems, params)
                    bar.update()
                row = [outcomes[window, k, tau] for tau in TAUS]
                cells = (f"{outcome.accuracy:.1%}, {outcome.tpf:.2f}" for outcome in row)
                print(f"| {window} | {k} | {' | '.join(cells)} |", flush=True)
    if plot:
        draw(outcomes, plot)


def blocks(llm: LLM, limit: int) -> None:
    """Prints exact, TPF and computed tokens a pass, those of prompts included, by block size and number of branches."""
    problems = read(limit)
    print("| block size | k | exact | TPF | tokens computed a pass |")
    print("|---|---|---|---|---|")
    for size in BLOCK_SIZES:
        for k in (0, 3, 7):
            outcome = evaluate(llm, problems, replace(decoding(k, 0.9), block_size=size), quiet=False)
            print(
                f"| {size} | {k} | {outcome.accuracy:.1%} | {outcome.tpf:.2f} | {outcome.model_tokens:.0f} |",
                flush=True,
            )


def kinds(llm: LLM, limit: int) -> None:
    """Prints exact by kind and by number of steps: held-out, in unseen wordings, by hand, by an independent author."""
    sets = {
        "held-out": read_set(HELD_OUT, limit),
        "by hand": read_set(HANDWRITTEN, limit),
        "independent": read_set(INDEPENDENT, limit),
        "unseen wordings": unseen(limit),
    }
    exact: dict[tuple[str, int], list[bool]] = {}
    for name, questions in sets.items():
        for num_branches in (0, 7):
            outputs = llm.chat([asked(question.text) for question in questions], decoding(num_branches, 0.9))
            exact[name, num_branches] = solved(outputs, [question.result for question in questions])
    kinds_of = {name: [question.kind for question in questions] for name, questions in sets.items()}
    print_groups("kind", kinds_of, exact)
    steps_of = {name: [steps_class(question.num_steps) for question in questions] for name, questions in sets.items()}
    print_groups("steps", steps_of, exact)


def steps_class(num_steps: int) -> str:
    """Number of steps, in three classes."""
    return {1: "one step", 2: "two steps"}.get(num_steps, "more steps")


def print_groups(heading: str, groups: dict[str, list[str]], exact: dict[tuple[str, int], list[bool]]) -> None:
    """Prints a table of exact by group of problems.

    Args:
        heading: of the first column, which has the groups.
        groups: the group of each problem, by name of the set.
        exact: whether each problem is solved, by name of the set and number of branches.
    """
    print(f"\n| {heading} | {' | '.join(f'{name} | d2f | lopa, k = 7' for name in groups)} |")
    print(f"|---|{'---|---|---|' * len(groups)}")
    names = dict.fromkeys(itertools.chain.from_iterable(groups.values()))
    for group in [*names, "all"]:
        cells = [group]
        for name, of_set in groups.items():
            chosen = [i for i, own in enumerate(of_set) if group in (own, "all")]
            cells.append(str(len(chosen)))
            for num_branches in (0, 7):
                right = sum(exact[name, num_branches][i] for i in chosen)
                cells.append(f"{right / len(chosen):.0%}" if chosen else "")
        print(f"| {' | '.join(cells)} |", flush=True)


def typed(llm: LLM, limit: int) -> None:
    """Prints exact of held-out problems that are typed in other ways, or stand after other messages."""
    conversations_by_way, results = typed_ways(limit)
    for name, conversations in conversations_by_way.items():
        _print_exact(llm, name, conversations, results)
    _print_exact(llm, "going on from an answer", *going_on(limit))


def choose(llm: LLM, limit: int) -> None:
    """Prints exact of d2f on the problems that choose between checkpoints; the files of problems have no part in it."""
    for name, questions in (("unseen wordings", unseen(limit)), ("other held-out problems", other_held_out(limit))):
        outputs = llm.chat([asked(question.text) for question in questions], decoding(0, 0.9))
        exact = solved(outputs, [question.result for question in questions])
        print(f"{name:24s} {sum(exact)} of {len(exact)}, {sum(exact) / len(exact):.1%}", flush=True)


def _print_exact(llm: LLM, name: str, conversations: list[Conversation], results: list[int]) -> None:
    shares = []
    for num_branches in (0, 7):
        outputs = llm.chat(conversations, decoding(num_branches, 0.9))
        shares.append(f"{sum(solved(outputs, results)) / len(results):6.1%}")
    print(f"{name:26s} d2f {shares[0]}  lopa, k = 7 {shares[1]}", flush=True)


def prefix(model: str | None, limit: int, options: dict[str, Any]) -> None:
    """Decodes prompts that begin with the same solved problems, with the exact prefix cache and the approximate one."""
    from scripts.demo_tokenizer import ASSISTANT, EOS, USER

    examples = read_set(HELD_OUT)[-4:]
    shots = "".join(f"{USER}{example.text}{ASSISTANT}{example.worked_answer}{EOS}" for example in examples)
    problems = read(limit)
    prompts = [f"{shots}{USER}{question}{ASSISTANT}" for question, _ in problems]
    texts: dict[str, list[str | None]] = {}
    for name in ("exact", "approximate"):
        llm = load(model, approximate_prefix_caching=name == "approximate", max_num_seqs=1, **options)
        outputs = llm.generate(prompts, decoding(3, 0.9))
        reused = sum(output.cached_tokens for output in outputs) / sum(len(o.prompt_token_ids) for o in outputs)
        exact = share_of_exact(outputs, problems)
        print(f"{name:12s} exact {exact:6.1%}  prompt tokens reused {reused:5.1%}", flush=True)
        texts[name] = [output.text for output in outputs]
    changed = sum(a != b for a, b in zip(texts["exact"], texts["approximate"], strict=True))
    print(f"{changed} of {len(problems)} answers changed")


def load(model: str | None, **options: Any) -> LLM:
    """The model. Ends this process with one line if it cannot be loaded."""
    from lopa_ascend import LLM  # imports torch, which takes seconds

    try:
        return LLM(model, **options)
    except (ValueError, OSError) as error:
        sys.exit(str(error))


def draw(outcomes: dict[tuple[str, int, float], Outcome], path: Path) -> None:
    """Writes the table as a picture."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(WINDOWS), figsize=(10, 4), sharey=True)
    for axis, window in zip(axes, WINDOWS, strict=True):
        for k in BRANCHES:
            points = [outcomes[window, k, tau] for tau in TAUS]
            tpfs, percents = [point.tpf for point in points], [100 * point.accuracy for point in points]
            axis.plot(tpfs, percents, marker="o", label=f"k = {k}")
        axis.set(title=window, xlabel="tokens per forward")
        axis.grid(alpha=0.3)
    lowest = min(100 * outcome.accuracy for outcome in outcomes.values())
    axes[0].set(ylabel="exact answers, %", ylim=(min(HIGHEST_START, lowest), 100))
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.eval_demo", description=__doc__, formatter_class=HelpFormatter
    )
    parser.add_argument("what", choices=DEFAULT_LIMITS, help="what to measure")
    parser.add_argument("--model", metavar="DIR", help="another model directory (default: the bundled model)")
    limits = ", ".join(f"{limit} for {what}" for what, limit in DEFAULT_LIMITS.items())
    parser.add_argument("--limit", type=number_from(1), metavar="N", help=f"number of problems (default: {limits})")
    parser.add_argument(
        "--block-size", type=number_from(1), metavar="N", help="with table: instead of the recommended one"
    )
    parser.add_argument("--plot", type=picture, metavar="FILE", help="with table: also write it as a picture")
    parser.add_argument("--device", default="cpu", help="cpu or npu (default: cpu)")
    parser.add_argument(
        "--dtype", default="auto", help="dtype of the weights: auto, float32 or bfloat16 (default: auto)"
    )
    parser.add_argument("--graph-mode", help="how a step runs (default: the engine's for the device)")
    parser.add_argument("--attention-layout", default="TND", help="on an NPU: TND, TND16 or BSH (default: TND)")
    args = parser.parse_args()
    if args.what != "table" and (args.block_size or args.plot):
        parser.error(f"--block-size and --plot go with table, not with {args.what}")
    options = {name: getattr(args, name) for name in ("device", "dtype", "graph_mode", "attention_layout")}
    limit = args.limit or DEFAULT_LIMITS[args.what]
    num_held_out = len(read_set(HELD_OUT))
    if args.what == "typed" and limit >= num_held_out:
        parser.error(f"--limit of typed is at most {num_held_out - 1}: it needs one problem more")
    if args.what != "choose" and limit > num_held_out:
        parser.error(f"--limit of {args.what} is at most {num_held_out}, the number of held-out problems")
    if args.what == "prefix":
        prefix(args.model, limit, options)
        return
    # With cached prompts a setting would compute fewer tokens the later it is measured.
    llm = load(args.model, enable_prefix_caching=False, **options)
    if args.what == "table":
        table(llm, limit, args.block_size, args.plot)
    else:
        measurements = {
            "targets": targets, "blocks": blocks, "kinds": kinds, "typed": typed, "choose": choose, "ways": ways,
        }  # fmt: skip
        measurements[args.what](llm, limit)


if __name__ == "__main__":
    main()
