"""The engine as a model of lm-eval, on the bundled model."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from lopa_ascend import LLM
from lopa_ascend.config import ParameterError
from scripts.eval import tasks
from scripts.eval.files import DATA, read_examples, read_problems
from scripts.eval.prompts import PromptMaker, find_format
from scripts.eval.task_kinds import TASKS

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed (the extra eval)")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_num_seqs=4, threads=1)


@pytest.fixture(scope="module")
def lm(llm: LLM):
    from scripts.eval.lm import LopaLM

    return LopaLM(llm=llm, batch_size=4, mc_num=4, max_new_tokens=64)


def instance(*args) -> SimpleNamespace:
    return SimpleNamespace(args=args, task_name="")


def run(lm, names: list[str], format_name: str, limit: int, examples: int | None = None) -> dict:
    from scripts.eval.lm_tasks import lm_eval_task

    prompt = find_format(format_name)
    configs = []
    for name in names:
        task = TASKS[name]
        problems = [problem for _, problem in read_problems(DATA / f"{name}.jsonl", name).problems][:limit]
        configs.append(lm_eval_task(task, problems, read_examples(task, None, examples or 0), prompt))
    return lm_eval.simple_evaluate(
        model=lm, tasks=configs, limit=limit, bootstrap_iters=0, apply_chat_template=prompt.chat_template,
        fewshot_as_multiturn=prompt.fewshot_as_multiturn, system_instruction=prompt.system,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("format_name", "names", "examples"),
    [
        ("dream-instruct", ["gsm8k", "mbpp"], 2),
        ("plain", ["gsm8k", "mbpp"], 2),
        ("diffucoder-instruct", ["humaneval_plus", "mbpp_plus"], 0),
    ],
)
def test_lm_eval_makes_the_benchmarks_prompts_and_scores(lm, format_name: str, names: list[str], examples: int):
    lm.counts.clear()
    results = run(lm, names, format_name, 2, examples)
    for name in names:
        task = TASKS[name]
        assert [counts.opened_tokens >= counts.visible_tokens for counts in lm.counts[f"lopa_{name}"]] == [True] * 2
        samples = sorted(results["samples"][f"lopa_{name}"], key=lambda sample: sample["doc_id"])
        assert len(samples) == 2
        maker = PromptMaker(find_format(format_name), lm.tokenizer)
        for sample, (_, problem) in zip(samples, read_problems(DATA / f"{name}.jsonl", name).problems, strict=False):
            assert sample["arguments"][0][0] == maker.text(task, problem, read_examples(task, None, examples))
            found = task.score(problem, task.cut(sample["resps"][0][0]))
            assert {metric: sample[metric] for metric in found} == found


def test_gsm8k_of_lm_eval_itself_has_the_same_prompts_and_scores(lm, tmp_path: Path):
    import yaml

    config = yaml.safe_load((Path(lm_eval.__file__).parent / "tasks/gsm8k/gsm8k.yaml").read_text())
    files = {"train": str(DATA / "gsm8k.examples.jsonl"), "test": str(DATA / "gsm8k.jsonl")}
    config |= {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
    config |= {"num_fewshot": 2, "fewshot_config": {"sampler": "first_n"}, "task": "official"}
    prompt = find_format("dream-instruct")
    official = lm_eval.simple_evaluate(
        model=lm, tasks=[config], limit=3, bootstrap_iters=0, apply_chat_template=True,
        fewshot_as_multiturn=prompt.fewshot_as_multiturn,
    )  # fmt: skip
    ours = run(lm, ["gsm8k"], "dream-instruct", 3, 2)
    by_doc = lambda samples: sorted({s["doc_id"]: s for s in samples}.items())  # noqa: E731
    for (_, theirs), (_, own) in zip(
        by_doc(official["samples"]["official"]), by_doc(ours["samples"]["lopa_gsm8k"]), strict=True
    ):
        assert theirs["arguments"][0][0] == own["arguments"][0][0]
        assert theirs["resps"] == own["resps"]
    scores = official["results"]["official"]
    assert scores["exact_match,strict-match"] == ours["results"]["lopa_gsm8k"]["strict_match,none"]
    assert scores["exact_match,flexible-extract"] == ours["results"]["lopa_gsm8k"]["flexible_extract,none"]


def test_answers_end_at_stop_strings_in_batches_of_equal_requests(lm):
    prompt = lm.apply_chat_template([{"role": "user", "content": "Tom has 12 apples. Tom buys 35 more. How many now?"}])
    whole, cut, again = lm.generate_until(
        [instance(prompt, {"until": []}), instance(prompt, {"until": ["####"]}), instance(prompt, {"until": "####"})],
        disable_tqdm=True,
    )
    assert "####" in whole
    assert cut == again == whole.split("####")[0]


def test_what_a_task_asks_for_is_taken_or_refused(llm: LLM):
    from scripts.eval.lm import LopaLM

    plain, fixed = LopaLM(llm=llm), LopaLM(llm=llm, preset="S13", escape_until=True)
    asked = {"until": ["a", ""], "max_gen_toks": 33, "do_sample": True, "temperature": 0.5, "top_p": 0.9}
    params = plain.request_params(asked)
    assert (params.max_new_tokens, params.stop, params.temperature, params.top_p) == (33, ("a",), 0.5, 0.9)
    assert plain.request_params({**asked, "do_sample": False}).temperature == 0
    assert (fixed.request_params(asked).max_new_tokens, fixed.request_params(asked).stop) == (512, ())
    own = LopaLM(llm=llm, stop=("end", "a"))
    assert own.request_params({"until": ["a", "b"]}).stop == ("end", "a", "b")
    assert own.request_params({}).stop == ("end", "a")
    with pytest.raises(ParameterError, match="generation_kwargs: unknown 'num_beams'"):
        plain.request_params({"num_beams": 4})
    with pytest.raises(ParameterError, match="neither an option of the engine nor a decoding parameter"):
        LopaLM(llm=llm, tau=0.9)
    with pytest.raises(ParameterError, match="add_bos: needs a BOS token"):
        LopaLM(llm=llm, add_bos=True)


def test_lm_eval_finds_it_by_its_name():
    import scripts.eval.lm
    from scripts.eval.lm_tasks import lm_eval_task

    assert scripts.eval.lm.LopaLM.__name__ == "LopaLM"
    problem = read_problems(DATA / "gsm8k.jsonl", "gsm8k").problems[0][1]
    task = lm_eval_task(TASKS["gsm8k"], [problem], [], find_format("plain"))
    options = {"max_new_tokens": 32, "threads": 1, "batch_size": 2, "num_branches": 2}
    results = lm_eval.simple_evaluate(model="lopa", model_args=options, tasks=[task], bootstrap_iters=0)
    assert results["results"]["lopa_gsm8k"]["strict_match,none"] in (0, 1)


def test_multiple_choice_is_scored_by_likelihood(lm):
    tokens = lm.loglikelihood([instance("One and one is", " two"), instance("", "two")], disable_tqdm=True)
    assert all(value < 0 and greedy is False for value, greedy in tokens)
    assert lm.loglikelihood_rolling([instance("One and one is two.")], disable_tqdm=True)[0] < 0


def test_choices_of_a_question_share_one_pass_over_masks(llm: LLM):
    from scripts.eval.lm import LopaLM

    lm, context = LopaLM(llm=llm, mc_num=0), "One and one is"
    before = llm.engine.stats().num_steps
    asked = [instance(context, " two"), instance("One", " and"), instance(context, " 2")]
    found = [value for value, _ in lm.loglikelihood(asked, disable_tqdm=True)]
    assert llm.engine.stats().num_steps - before == 2
    first, last = llm.score(context, [" two", " 2"])
    assert (found[0], found[2]) == (sum(first), sum(last))


def test_the_command_writes_scores_counts_and_answers_of_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "scores.json"
    arguments = "problems --limit 1 --threads 1 --num-branches 0 --tau-conf 0.9 0.7 --max-new-tokens 96".split()
    tasks.main([*arguments, "--out", str(out)])
    assert "one token a pass: problems: exact 100.0; summed TPF 0." in capsys.readouterr().out
    content = json.loads(out.read_text())
    first, *others = content["points"]
    assert first["tpf"]["problems"]["lopa_tpf"] < 1.2
    assert all(point["tpf"]["problems"]["summed_tpf"] > 4 for point in others)
    assert content["model"] == "bundled"
    assert content["machine"]["versions"]["lm_eval"] == lm_eval.__version__
    assert others[0]["decoding"]["max_new_tokens"] == 96
    assert content["settings"]["engine"]["seed"] == 0
    assert len(others[0]["samples"]["lopa_problems"]) == 1
