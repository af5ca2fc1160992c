"""The engine with compiled steps on the simulated device: the golden traces and the bundled model through replayed ACL
graphs, and through torchair's FX graphs after its passes; what a step launches, and where the host waits."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from examples.plain_dream.plain_dream import PlainDream
from lopa_ascend import LLM, DecodingParams
from lopa_ascend.backend.npu.compiler import PackageCompiler
from lopa_ascend.config import EngineConfig, GraphParams
from lopa_ascend.core import Request
from lopa_ascend.engine.engine import Engine
from lopa_ascend.kv.pages import PAGE_SIZE
from lopa_ascend.model.plain import Attend
from scripts.eval.demo import decoding, evaluate
from scripts.eval.problems import read
from tests import golden
from tests.golden_families import Case
from tests.npu.lab import capture, device, engine  # noqa: F401
from tests.npu.lab.constraints import numeric
from tests.npu.lab.traffic import Traffic, host_traffic
from tests.plain_dream import as_plain, registered
from tests.tiers import slow_but
from tests.tiny import write_dream

pytestmark = pytest.mark.npu
MODES = ("npugraph_ex", "ge")
ALIKE = ("window_attention", "confidence")
QUICK = ("A", "block_causal", "max_prob")
BY_KIND = golden.cases_by_kind()


def options(**changes: Any) -> dict[str, Any]:
    return {"device": "npu", "max_num_seqs": 1, "graph_window_blocks": 8, "enable_prefix_caching": False, **changes}


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        pytest.param(mode, kind, marks=() if kind == QUICK else pytest.mark.slow, id="-".join((mode, *kind)))
        for mode in MODES
        for kind in BY_KIND
    ],
)
def test_golden_cases(mode: str, kind: tuple[str, str, str]) -> None:
    check_golden_cases(mode, kind, golden.FOLDER / "models" / kind[0])


@pytest.mark.parametrize(
    ("mode", "kind"),
    [pytest.param(mode, kind, id="-".join((mode, *kind))) for mode in MODES for kind in BY_KIND],
)
@pytest.mark.slow  # test_fusion.py lowers a step of such a model to the kernels of the one written by hand
def test_golden_cases_of_a_model_in_plain_torch(mode: str, kind: tuple[str, str, str], tmp_path: Path) -> None:
    with registered():
        check_golden_cases(mode, kind, as_plain(golden.FOLDER / "models" / kind[0], tmp_path / kind[0]))


def check_golden_cases(mode: str, kind: tuple[str, str, str], model: Path) -> None:
    """All cases of a kind through one engine."""
    traces = [golden.read(case) for case in BY_KIND[kind]]
    params = [golden.decoding_params(trace) for trace in traces]
    compiled = GraphParams(
        num_branches=max(p.lookaheads for p in params),
        block_size=max(p.block_size for p in params),
        window_attention=kind[1],
        confidence=kind[2],
    )
    with numeric():
        llm = LLM(model, dtype="float32", graph_mode=mode, **options(graph_params=compiled))
        for trace, each in zip(traces, params, strict=True):
            output = llm.generate([trace["prompt_ids"]], each, trace=True, quiet=True)[0]
            assert list(output.token_ids) == trace["output_ids"]
            assert [record.winner for record in output.trace or ()] == [r["winner"] for r in golden.rounds(trace)]
    stats = llm.engine.stats().graphs
    assert stats is not None
    assert stats.num_steps > 0
    assert set(stats.eager_steps) <= {"branch_score", "graph_window_blocks"}
    assert stats.num_late == 0


@pytest.mark.parametrize("branch_acceptance", ["verified", "exact"])
@pytest.mark.parametrize("mode", MODES)
def test_branches_that_must_be_confirmed_win_as_on_the_cpu(mode: str, branch_acceptance: str, tmp_path: Path) -> None:
    path = write_dream(tmp_path)
    fields: dict[str, Any] = {"block_size": 8, "max_new_tokens": 40, "tau_conf": 0.5, "ignore_eos": True}
    params = DecodingParams(**fields, num_branches=3, branch_acceptance=branch_acceptance)
    graphs = options(graph_params=GraphParams(block_size=8, branch_acceptance=branch_acceptance), graph_window_blocks=4)
    with numeric():
        llm = LLM(path, dtype="float32", graph_mode=mode, max_model_len=128, **graphs)
        output = llm.generate([[5, 3, 8, 2, 9]], params, trace=True, quiet=True)[0]
    on_cpu = LLM(path, dtype="float32").generate([[5, 3, 8, 2, 9]], params, trace=True, quiet=True)[0]
    assert output.token_ids == on_cpu.token_ids
    winners = [record.winner for record in output.trace or ()]
    assert winners == [record.winner for record in on_cpu.trace or ()]
    assert min(winners[1:]) < 3
    stats = llm.engine.stats().graphs
    assert stats is not None
    assert (stats.num_steps > 0, stats.eager_steps) == (True, {})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.slow  # test_lowering.py has the kernels of a packed step
def test_packed_steps_give_the_tokens_of_the_cpu(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An NPU has full buckets alone, because each takes minutes; but its graphs hold packed steps, too."""
    monkeypatch.setattr(PackageCompiler, "packs", True)
    path = write_dream(tmp_path)
    fields: dict[str, Any] = {"block_size": 8, "max_new_tokens": 24, "tau_conf": 0.5, "ignore_eos": True}
    params = DecodingParams(**fields, num_branches=3, max_active_blocks=1)
    with numeric():
        graphs = options(graph_params=GraphParams(block_size=8), graph_window_blocks=2)
        llm = LLM(path, dtype="float32", graph_mode=mode, max_model_len=128, **graphs)
        output = llm.generate([[5, 3, 8, 2, 9]], params, trace=True, quiet=True)[0]
    on_cpu = LLM(path, dtype="float32").generate([[5, 3, 8, 2, 9]], params, trace=True, quiet=True)[0]
    assert output.token_ids == on_cpu.token_ids
    assert [r.winner for r in output.trace or ()] == [r.winner for r in on_cpu.trace or ()]
    stats = llm.engine.stats().graphs
    assert stats is not None
    assert (stats.num_buckets, stats.eager_steps) == (3, {})
    assert stats.tokens < 4 * 16 * stats.num_steps, "some were packed"


@pytest.mark.parametrize(
    ("mode", "window", "block_size"),
    slow_but(
        product(MODES, ("block_causal", "full"), (32, 24)),
        [("npugraph_ex", "block_causal", 32), ("npugraph_ex", "full", 24)],
    ),
)
def test_entries_of_16_queries_change_no_token(mode: str, window: str, block_size: int, tmp_path: Path) -> None:
    """Blocks of 32 are two entries of 16, blocks of 24 one of 16 and one of 8."""
    path = write_dream(tmp_path, hidden=64, heads=4, kv_heads=2, dtype=torch.bfloat16)
    blocks: dict[str, Any] = {"block_size": block_size, "max_active_blocks": 2, "window_attention": window}
    params = DecodingParams(num_branches=3, max_new_tokens=96, tau_conf=1.0, ignore_eos=True, **blocks)
    # With so many pages one kernel takes all entries of a layer.
    compiled = GraphParams(block_size=block_size, window_attention=window)
    graphs = options(max_model_len=256, graph_window_blocks=2, graph_params=compiled, kv_cache_memory=2**22)
    tokens, entries, updates, steps = [], [], [], []
    with numeric():
        for layout in ("TND", "TND16"):
            changes = {**graphs, "attention_layout": layout}
            llm = LLM(path, graph_mode=mode, **changes)
            assert llm.engine.runner.graphs is not None
            entries += [sum(launcher.bucket.entries for launcher in llm.engine.runner.graphs.launchers.values())]
            with host_traffic() as traffic:
                tokens += [llm.generate([[5, 3, 8]], params, quiet=True)[0].token_ids]
            updates += [traffic.updates]
            stats = llm.engine.stats().graphs
            assert stats is not None
            steps += [stats.num_steps]
    assert tokens[0] == tokens[1]
    assert updates[0] == updates[1]
    assert steps[0] == steps[1] > 5
    assert entries[1] == (2 if window == "block_causal" else 2 * block_size // 16) * entries[0]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_the_bundled_model_solves_as_many_problems_as_on_the_cpu(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    problems, params = read(50), decoding(num_branches=3)
    changes = {"max_num_seqs": 8, "graph_window_blocks": 4, "max_model_len": 512}
    with numeric():
        llm = LLM(dtype="bfloat16", graph_mode=mode, **options(**changes))
        solved = evaluate(llm, problems, params).accuracy
    on_cpu = evaluate(LLM(dtype="bfloat16"), problems, params).accuracy
    with capsys.disabled():
        print(f"\n{len(problems)} held-out problems, bfloat16: {mode} {solved:.1%}, cpu {on_cpu:.1%}")
    assert solved >= on_cpu - 0.02
    stats = llm.engine.stats().graphs
    assert stats is not None
    # Whether an answer ever opens more blocks than the graphs' window has depends on the model.
    assert sum(stats.eager_steps.values()) < 0.1 * stats.num_steps
    assert stats.eager_steps.keys() <= {"graph_window_blocks"}
    assert stats.num_late == 0


def test_a_step_is_one_launch_between_two_copies_and_the_host_waits_for_the_step_before_alone(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = write_dream(tmp_path_factory.mktemp("model"), hidden=64, heads=4, kv_heads=2, dtype=torch.bfloat16)
    config = EngineConfig(
        model=str(path), graph_mode="npugraph_ex", **options(max_model_len=256, graph_window_blocks=4)
    )
    params = DecodingParams(max_new_tokens=128, block_size=32, tau_conf=1.0, ignore_eos=True, max_active_blocks=2)
    prompt = list(range(5, 101))  # with two blocks, of 32 steps each, its keys and values go on to a second page
    with numeric():
        served = Engine(config)
        before = served.stats().graphs
        served.add(Request("a", tuple(prompt), params))
        for _ in range(3):  # the prompt, and two launches until results come back
            served.step()
        steps = inputs_written = 0
        while steps < 50:
            with host_traffic() as traffic:
                updates = served.step()
            assert [update.error for update in updates] == [None]
            *inputs, launch, output = traffic.launches
            assert (launch, output) == ("replay", "copy to host")
            assert inputs in ([], ["copy to device"])  # none where they are those of the launch before
            inputs_written += len(inputs)
            assert traffic.stalls == ["wait aclrtSynchronizeEvent"]
            steps += 1
        assert 0 < inputs_written < steps / 2
        after = served.stats().graphs
    assert before is not None
    assert after is not None
    assert after.num_buckets == before.num_buckets
    assert after.num_steps - before.num_steps == steps + 2
    assert (after.num_late, after.eager_steps) == (0, {})


def test_only_lengths_that_changed_are_written_to_a_graph(tmp_path: Path) -> None:
    """A replay with the lengths of the replay before writes none, another one those of every attention task."""
    prompt = list(range(5, 25))
    path = write_dream(tmp_path, hidden=64, heads=4, kv_heads=2, dtype=torch.bfloat16)
    config = options(max_model_len=256, graph_window_blocks=2)
    params = DecodingParams(max_new_tokens=48, block_size=16, tau_conf=1.0, ignore_eos=True, max_active_blocks=2)
    steps: list[Traffic] = []
    tokens: list[int] = []
    with numeric():
        before = capture.tapes()
        served = Engine(EngineConfig(model=str(path), graph_mode="npugraph_ex", **config))
        *_, tape = capture.tapes(other_than=before)  # after that of the check at start
        served.add(Request("a", tuple(prompt), params))
        while served.has_work():
            with host_traffic() as traffic:
                tokens += [token for update in served.step() for token in update.token_ids]
            steps.append(traffic)
        (eager,) = LLM(path, graph_mode="eager", **config).generate([prompt], params, quiet=True)
    stats, tasks = served.stats().graphs, len(tape.groups)
    assert stats is not None
    assert len(stats.replay_milliseconds) == stats.num_buckets > 0
    replays = [traffic for traffic in steps if "replay" in traffic.launches]
    updates = sum(traffic.updates for traffic in replays)
    assert tokens == list(eager.token_ids)
    assert {traffic.updates for traffic in replays} == {0, tasks}
    assert updates <= tasks * len(replays) / 2


@pytest.mark.slow  # test_compiler.py keeps and takes graphs by their key
def test_kept_graphs_are_taken_for_a_pool_of_the_same_size_alone(tmp_path: Path) -> None:
    """And for other weights of the same shapes, which are not in them."""
    models = [
        str(write_dream(tmp_path / f"model{seed}", seed=seed, hidden=64, heads=4, kv_heads=2, dtype=torch.bfloat16))
        for seed in range(2)
    ]
    page = PAGE_SIZE * 2 * 2 * 2 * 16 * 2  # positions, keys and values, layers, heads, elements, bytes
    params = DecodingParams(max_new_tokens=32)
    made, tokens = [], []
    with numeric():
        for model, pages in ((0, 32), (1, 32), (0, 40)):
            changes = {"max_model_len": 256, "graph_window_blocks": 2, "kv_cache_memory": pages * page}
            kept = {"graph_mode": "npugraph_ex", "graph_cache": str(tmp_path / "kept")}
            llm = LLM(models[model], **options(**kept, **changes))
            assert llm.engine.runner.graphs is not None
            compiler = llm.engine.runner.graphs.graphs.compiler
            made.append((compiler.num_compilations, compiler.num_loaded))
            tokens.append(llm.generate([[5, 6, 7]], params, quiet=True)[0].token_ids)
        eager = [
            LLM(model, **options(graph_mode="eager")).generate([[5, 6, 7]], params, quiet=True)[0].token_ids
            for model in models
        ]
    assert made == [(1, 0), (0, 1), (1, 0)]
    assert tokens == [eager[0], eager[1], eager[0]]
    assert eager[0] != eager[1]


@pytest.mark.slow
def test_kept_graphs_of_a_plain_model_hold_for_its_forward_alone(tmp_path: Path) -> None:
    """Whatever its weights are; the class that computes it is no part of this project's code."""

    class Louder(PlainDream):
        def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
            return super().forward(tokens, positions, attend) * 1.5

    models = []
    for seed in range(2):
        model = write_dream(tmp_path / f"dream{seed}", seed=seed, hidden=64, heads=4, kv_heads=2, dtype=torch.bfloat16)
        models.append(as_plain(model, tmp_path / f"plain{seed}"))
    params, made, tokens, eager = DecodingParams(max_new_tokens=32), [], [], []
    changes = {"max_model_len": 256, "graph_window_blocks": 2, "kv_cache_memory": 2**22}
    kept = {"graph_mode": "npugraph_ex", "graph_cache": str(tmp_path / "kept")}
    with numeric():
        for build, model in ((PlainDream, models[0]), (PlainDream, models[1]), (Louder, models[0])):
            with registered(build):
                llm = LLM(model, **options(**kept, **changes))
                plain = LLM(model, **options(graph_mode="eager"))
            assert llm.engine.runner.graphs is not None
            compiler = llm.engine.runner.graphs.graphs.compiler
            made.append((compiler.num_compilations, compiler.num_loaded))
            tokens.append(llm.generate([[5, 6, 7]], params, quiet=True)[0].token_ids)
            eager.append(plain.generate([[5, 6, 7]], params, quiet=True)[0].token_ids)
    assert made == [(1, 0), (0, 1), (1, 0)]
    assert tokens == eager
    assert len(set(eager)) == 3


@pytest.mark.parametrize(
    ("mode", "quantization"), slow_but(product(MODES, (None, "w8a8")), [("ge", None), ("npugraph_ex", "w8a8")])
)
def test_experts_are_launched_with_the_step(mode: str, quantization: str | None, tmp_path: Path) -> None:
    """With a router that bfloat16 holds exactly."""
    params = DecodingParams(max_new_tokens=30, num_branches=3, block_size=8, tau_conf=0.5, tau_add=1.0, ignore_eos=True)
    model, prompt = (
        shutil.copytree(golden.FOLDER / "models" / "llada2" / "model_a", tmp_path / "model"),
        [5, 3, 8, 2, 9],
    )
    weights = load_file(model / "model.safetensors")
    save_file({name: x.bfloat16().to(x.dtype) for name, x in weights.items()}, model / "model.safetensors")
    graphs = options(graph_params=GraphParams(num_branches=3, block_size=8), max_model_len=128)
    with numeric():
        outputs = []
        for graph_mode in ("eager", mode):
            llm = LLM(model, graph_mode=graph_mode, dtype="bfloat16", quantization=quantization, **graphs)
            outputs.append(llm.generate([prompt], params, quiet=True)[0])
        stats = llm.engine.stats().graphs
    assert stats is not None
    assert stats.num_steps
    assert not stats.eager_steps
    assert outputs[0].token_ids == outputs[1].token_ids


CAUSAL = ("nemotron/ar_p13", "nemotron/block_b8_th07_p5", "pangu/block_b32_th09_s8_p21")


@pytest.mark.parametrize(
    ("case", "mode"), slow_but(product(CAUSAL, MODES), [*product(CAUSAL[:2], MODES), (CAUSAL[2], MODES[0])])
)
def test_golden_cases_of_a_causal_model(case: str, mode: str) -> None:
    """Its forward passes are compiled; a pass that commits has a causal mask."""
    found = Case.read(golden.FOLDER / "models" / case / "trace.json")
    with numeric():
        graphs = options(graph_params=GraphParams.of(found.params), max_model_len=96)
        llm = LLM(found.model, dtype="float32", graph_mode=mode, **graphs)
        assert found.run(llm) is None
    stats = llm.engine.stats().graphs
    assert stats is not None
    assert stats.num_steps > 0
    assert not stats.eager_steps
    assert stats.num_late == 0
