"""Compares numbers of lookahead branches, fixed and "auto", by tokens/s of the bundled model at several loads.

    python -m scripts.bench_auto                                    this CPU, at 1, 8 and 32 clients
    python -m scripts.bench_auto --simulate 910c                    the planner's cost of a step of Dream-7B as clock
    python -m scripts.bench_auto --acceptance exact --limit 16      another branch_acceptance, fewer problems

A client sends its next problem as soon as it has an answer, so as many requests run as there are clients. Prints a row
for each number of clients: tokens/s for each number of branches, and tokens/s of "auto" divided by those of the best
fixed number. All columns of a row are measured one after the other in one run, in --repeat rounds, of which the best
counts. On a CPU seconds are wall time, so the machine must be quiet. On a simulated device a step takes the time that
the planner predicts for its number of tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lopa_ascend.config import DecodingParams
from lopa_ascend.config.help import HelpFormatter
from lopa_ascend.decode.allotment import Allotment, StepCosts
from scripts.arguments import number_from
from scripts.eval.problems import asked, read
from scripts.planner.devices import DeviceError, load_device
from scripts.planner.models import load_model
from scripts.planner.step import Workload, predict

if TYPE_CHECKING:
    from lopa_ascend import LLM
    from lopa_ascend.model.base import ForwardInputs

CLIENTS = (1, 8, 32)
FIXED = (0, 1, 3, 7)
"""Lookahead branches."""


class SimulatedClock:
    """A probe that adds up what steps would take on a device.

    Attributes:
        seconds: so far.
    """

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self.seconds = 0.0

    @contextmanager
    def __call__(self, part: str, work: ForwardInputs) -> Iterator[None]:
        if part == "forward":
            self.seconds += self.costs.seconds(work.tokens.numel())
        yield


def device_costs(name: str) -> StepCosts:
    """The planner's cost of a step of Dream-7B, by the tokens that it computes."""
    model, device = load_model("Dream-7B"), load_device(name)
    sizes = [32 << power for power in range(12)]
    return StepCosts((size, predict(model, device, Workload(k=0, window=size, context=0)).step) for size in sizes)


def tokens_per_second(
    llm: LLM, problems: list[tuple[str, int]], params: DecodingParams, costs: StepCosts | None
) -> float:
    """Visible tokens of all answers divided by seconds, of the simulated device if there is one."""
    clock = None if costs is None else SimulatedClock(costs)
    if clock is not None:
        llm.engine.runner.set_probe(clock)
        llm.engine.runner.allotment = Allotment(clock.costs, llm.engine.limits.max_num_batched_tokens)
    start = time.perf_counter()
    outputs = llm.chat([asked(question) for question, _ in problems], params, quiet=True)
    seconds = time.perf_counter() - start if clock is None else clock.seconds
    return sum(len(output.token_ids) for output in outputs) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench_auto", description=__doc__, formatter_class=HelpFormatter
    )
    parser.add_argument("--model", metavar="DIR", help="another model directory (default: the bundled model)")
    parser.add_argument("--simulate", metavar="DEVICE", help="a device of scripts/planner/devices.json, or a file")
    parser.add_argument(
        "--acceptance",
        default="verified",
        choices=("published", "verified", "exact"),
        help="branch_acceptance of all requests (default: verified)",
    )
    parser.add_argument(
        "--by-load",
        action="store_true",
        help='with --acceptance published: let "auto" also look at what other requests compute',
    )
    parser.add_argument(
        "--limit", type=number_from(1), default=64, metavar="N", help="number of problems (default: 64)"
    )
    parser.add_argument("--repeat", type=number_from(1), default=3, metavar="N", help="rounds on a CPU (default: 3)")
    args = parser.parse_args()
    from lopa_ascend import LLM  # imports torch, which takes seconds

    try:
        costs = None if args.simulate is None else device_costs(args.simulate)
    except DeviceError as error:
        parser.error(f"--simulate: {error}")
    problems = read(args.limit)
    common: dict[str, Any] = {"branch_acceptance": args.acceptance, "max_new_tokens": 192}
    ways = {f"k = {k}": DecodingParams(num_branches=k, **common) for k in FIXED}
    by_load = True if args.by_load else None  # None: the default of this acceptance
    ways["auto"] = DecodingParams(num_branches="auto", branches_by_load=by_load, **common)
    print(f"| clients | {' | '.join(ways)} | auto, x best |\n|{'---|' * (len(ways) + 2)}")
    for clients in CLIENTS:
        llm = LLM(args.model, max_num_seqs=clients, enable_prefix_caching=False)
        best = dict.fromkeys(ways, 0.0)
        for _ in range(1 if costs else args.repeat):
            for name, params in ways.items():
                best[name] = max(best[name], tokens_per_second(llm, problems, params, costs))
        auto = best["auto"] / max(speed for name, speed in best.items() if name != "auto")
        print(f"| {clients} | {' | '.join(f'{speed:.0f}' for speed in best.values())} | {auto:.3f} |", flush=True)


if __name__ == "__main__":
    main()
