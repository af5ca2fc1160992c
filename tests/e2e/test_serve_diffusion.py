"""The event stream that shows every forward pass."""

from typing import Any

import pytest

from lopa_ascend import LLM, DecodingParams
from tests.e2e.conftest import ServerProcess
from tests.e2e.serving import events


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 3}, {"decoding": "d2f"}])
def test_events_are_the_trace_of_the_python_api(server: ServerProcess, model_dir: Any, fields: dict[str, Any]):
    llm = LLM(model_dir)
    params = DecodingParams(max_new_tokens=24, **fields)
    # A prompt of its own, for one that the server has in its prefix cache is not computed again.
    prompt = f"größer als {fields}"
    (output,) = llm.generate([prompt], params, trace=True, quiet=True)
    body = {"prompt": prompt, "max_tokens": 24, **fields}
    *steps, done = events(server.http.post("/v1/diffusion/completions", json=body).text)
    assert [step["object"] for step in steps] == ["diffusion.step"] * len(steps)
    assert output.trace is not None
    assert len(steps) == len(output.trace) == output.num_forwards
    for step, record in zip(steps, output.trace, strict=True):
        assert (step["index"], step["span"], step["committed"]) == (record.index, list(record.span), record.committed)
        assert [(b["score"], b["masks"]) for b in step["branches"]] == [(b.score, b.masks) for b in record.branches]
        assert [b["rank"] for b in step["branches"]] == [*range(1, len(record.branches)), 0]
        assert step["winner"] == (record.winner + 1) % len(record.branches)
        filled = [(fill["position"], fill["token_id"], fill["prob"], fill["confidence"]) for fill in step["fills"]]
        assert filled == [(fill.position, fill.token, fill.max_prob, fill.confidence) for fill in record.fills]
        assert done["text"].startswith(step["text"])
    lookaheads = [branch["lookahead"] for step in steps for branch in step["branches"] if branch["rank"]]
    assert all(fill.keys() == {"position", "token_id", "token", "confidence"} for fill in lookaheads)
    assert (done["object"], done["text"], tuple(done["token_ids"])) == ("diffusion.done", output.text, output.token_ids)
    assert (done["finish_reason"], done["stop_reason"]) == (output.finish_reason, output.stop_reason)
    assert done["usage"]["completion_tokens"] == len(output.token_ids)
    assert done["lopa"]["num_forwards"] == output.num_forwards


def test_chat(server: ServerProcess):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12}
    plain = server.http.post("/v1/chat/completions", json=body).json()
    *steps, done = events(server.http.post("/v1/diffusion/chat/completions", json=body).text)
    assert done["text"] == plain["choices"][0]["message"]["content"]
    assert {step["id"] for step in steps} == {done["id"]}
