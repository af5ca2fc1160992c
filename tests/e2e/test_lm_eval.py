"""The engine as a model of lm-eval, on the bundled model."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.config import ParameterError
from lopa_ascend.config.presets import PromptFormat
from lopa_ascend.demo import HANDWRITTEN, HELD_OUT
from scripts.arguments import InputError
from scripts.eval import tasks as command
from scripts.eval.lm_tasks import Evaluation, load_tasks, prompt_formats

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed (the extra eval)")


def find(name: str) -> PromptFormat:
    return prompt_formats()[name]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_num_seqs=4, threads=1)


@pytest.fixture(scope="module")
def lm(llm: LLM):
    from scripts.eval.lm import LopaLM

    return LopaLM(llm, llm.params(max_new_tokens=64), has_own_length=True, batch_size=4, mc_num=4)


def instance(*args) -> SimpleNamespace:
    return SimpleNamespace(args=args, task_name="")


GSM8K = {
    "dataset_path": "json",
    "dataset_name": None,
    "fewshot_config": {"sampler": "first_n"},
    "dataset_kwargs": {"data_files": {"train": str(HANDWRITTEN), "test": str(HELD_OUT)}},
}
"""lm-eval's GSM8K with the bundled model's problems."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for --include with GSM8K as lm-eval has it, but for its problems."""
    folder = tmp_path_factory.mktemp("tasks")
    config = yaml.safe_load((Path(lm_eval.__file__).parent / "tasks/gsm8k/gsm8k.yaml").read_text())
    (folder / "gsm8k.yaml").write_text(yaml.safe_dump(config | GSM8K))
    return folder


@pytest.mark.parametrize("name", ["plain", "chat"])
def test_a_task_of_lm_eval_is_asked_in_each_format_and_scored(llm: LLM, folder: Path, name: str):
    tasks = load_tasks({"gsm8k": 1}, find(name), folder)
    work = Evaluation(tasks=tasks, prompt=find(name), limit=2, batch_size=2)
    point = work.point(llm, llm.params(max_new_tokens=64), has_own_length=True)
    example, first = (json.loads(path.read_text().splitlines()[0]) for path in (HANDWRITTEN, HELD_OUT))
    turns = [
        f"Question: {example['question']}\nAnswer:",
        str(example["answer"]),
        f"Question: {first['question']}\nAnswer:",
    ]
    expected = f"{turns[0]} {turns[1]}\n\n{turns[2]}"
    if name == "chat":
        roles = ("user", "assistant", "user")
        expected = llm.tokenizer.render(
            [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)]
        )
    sample = min(point.samples["gsm8k"], key=lambda sample: sample["doc_id"])
    assert sample["arguments"][0][0] == expected
    assert list(point.scores["gsm8k"]) == ["exact_match,strict-match", "exact_match,flexible-extract"]
    answers = point.answers["gsm8k"]
    assert [each.opened_tokens >= each.visible_tokens > 0 and each.seconds is None for each in answers] == [True] * 2


def test_answers_that_are_made_alone_are_timed(llm: LLM):
    work = Evaluation(tasks=load_tasks({"problems": None}, find("chat")), prompt=find("chat"), limit=2, cut=False)
    point = work.point(llm, llm.params(max_new_tokens=96), has_own_length=True)
    assert point.scores["problems"] == {"exact_match,result": 1.0}
    assert len(point.answers["problems"]) == 2
    assert all(answer.seconds is not None and answer.seconds > 0 for answer in point.answers["problems"])


def test_what_cannot_be_evaluated_is_refused_before_a_model_is_needed(tmp_path: Path):
    with pytest.raises(InputError, match="lm-eval has no task 'gsm9k'; this project adds diffucoder_humaneval_plus"):
        load_tasks({"gsm9k": None}, find("chat"))
    config: dict[str, Any] = {"task": "programs", "output_type": "generate_until", "test_split": "test", **GSM8K}
    config |= {"doc_to_text": "{{question}}", "doc_to_target": "{{answer}}", "metric_list": [{"metric": "exact_match"}]}
    lost = config | {"task": "lost", "dataset_path": str(tmp_path / "absent")}
    (tmp_path / "lost.yaml").write_text(yaml.safe_dump(lost))
    (tmp_path / "programs.yaml").write_text(yaml.safe_dump(config | {"unsafe_code": True}))
    with pytest.raises(InputError, match="programs runs programs of the model; --confirm-run-unsafe-code allows it"):
        load_tasks({"programs": None}, find("chat"), tmp_path)
    assert list(load_tasks({"programs": None}, find("chat"), tmp_path, runs_code=True)) == ["programs"]
    with pytest.raises(InputError, match="task lost cannot be loaded: "):
        load_tasks({"lost": None}, find("chat"), tmp_path)


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

    plain = LopaLM(llm, DecodingParams())
    fixed = LopaLM(llm, DecodingParams(max_new_tokens=512), has_own_length=True, escape_until=True)
    asked = {"until": ["a", ""], "max_gen_toks": 33, "do_sample": True, "temperature": 0.5, "top_p": 0.9}
    params = plain.request_params(asked)
    assert (params.max_new_tokens, params.stop, params.temperature, params.top_p) == (33, ("a",), 0.5, 0.9)
    assert plain.request_params({**asked, "do_sample": False}).temperature == 0
    assert (fixed.request_params(asked).max_new_tokens, fixed.request_params(asked).stop) == (512, ())
    own = LopaLM(llm, DecodingParams(stop=("end", "a")))
    assert own.request_params({"until": ["a", "b"]}).stop == ("end", "a", "b")
    assert own.request_params({}).stop == ("end", "a")
    with pytest.raises(ParameterError, match="generation_kwargs: unknown 'num_beams'"):
        plain.request_params({"num_beams": 4})
    with pytest.raises(ParameterError, match="prompt: begins with a BOS token"):
        LopaLM(llm, DecodingParams(), add_bos=True)


def test_multiple_choice_is_scored_by_likelihood(lm):
    tokens = lm.loglikelihood([instance("One and one is", " two"), instance("", "two")], disable_tqdm=True)
    assert all(value < 0 and greedy is False for value, greedy in tokens)
    assert lm.loglikelihood_rolling([instance("One and one is two.")], disable_tqdm=True)[0] < 0


def test_choices_of_a_question_share_one_pass_over_masks(llm: LLM):
    from scripts.eval.lm import LopaLM

    lm, context = LopaLM(llm, llm.params(), mc_num=0), "One and one is"
    before = llm.engine.stats().num_steps
    asked = [instance(context, " two"), instance("One", " and"), instance(context, " 2")]
    found = [value for value, _ in lm.loglikelihood(asked, disable_tqdm=True)]
    assert llm.engine.stats().num_steps - before == 2
    first, last = llm.score(context, [" two", " 2"])
    assert (found[0], found[2]) == (sum(first), sum(last))


def test_the_command_writes_scores_counts_and_answers_of_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out, plot = tmp_path / "scores.json", tmp_path / "plot.svg"
    arguments = "problems --limit 1 --threads 1 --num-branches 0 --tau-conf 0.9 0.7 --max-new-tokens 96".split()
    command.main([*arguments, "--out", str(out), "--plot", str(plot)])
    assert "one token a pass: problems: exact_match,result 100.0; summed TPF 0." in capsys.readouterr().out
    content = json.loads(out.read_text())
    first, *others = content["points"]
    assert first["numbers"]["problems"]["lopa_tpf"] < 1.2
    assert all(point["numbers"]["problems"]["summed_tpf"] > 4 for point in others)
    assert content["model"] == "bundled"
    assert content["machine"]["versions"]["lm_eval"] == lm_eval.__version__
    assert others[0]["decoding"]["max_new_tokens"] == 96
    assert content["settings"]["engine"]["seed"] == 0
    assert len(others[0]["samples"]["problems"]) == 1
    assert "<svg" in plot.read_text()
