"""What the tests of the server share: prompts, and how answers are taken apart."""

import json
import os
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]

PROMPTS = [
    "a",
    "Tom has 3 boxes",
    "größer als 5 €?",
    "日本語のテキスト",
    "🙂🙃 emoji",
    "line\nbreak",
    " spaces ",
    "0" * 50,
]
OURS = ("ignore_eos", "top_k", "return_token_ids", "num_branches", "min_tokens")
"""Fields that the openai client does not know."""


def complete(client: Any, prompt, **fields):
    extra = {name: fields.pop(name) for name in list(fields) if name in OURS}
    return client.completions.create(model="tiny", prompt=prompt, extra_body=extra, **fields)


def text_of(choice: Any) -> str:
    """The text of a choice, whole or of one chunk, of either endpoint."""
    part = getattr(choice, "message", None) or getattr(choice, "delta", None)
    return (part.content or "") if part is not None else choice.text


def streamed(chunks) -> dict[int, tuple[str, str | None, int | str | None]]:
    """Text, finish reason and stop reason of every choice."""
    texts: dict[int, str] = {}
    ends: dict[int, tuple[str, int | str | None]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            assert choice.index not in ends, "something came after the finish chunk"
            texts[choice.index] = texts.get(choice.index, "") + text_of(choice)
            if choice.finish_reason is not None:
                ends[choice.index] = choice.finish_reason, choice.stop_reason
    assert texts.keys() == ends.keys()
    return {index: (texts[index], *ends[index]) for index in texts}


def whole(response) -> dict[int, tuple[str, str | None, int | str | None]]:
    return {choice.index: (text_of(choice), choice.finish_reason, choice.stop_reason) for choice in response.choices}


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line and line[0] != ":"]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of an answer, which must be in OpenAI's form."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert response.json().keys() == {"error"}
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["code"]
    return error


def installed(example: str, folder: Path) -> dict[str, str]:
    """The environment of a process in which an example is installed, by what ``pip`` writes to a folder."""
    source, name = ROOT / "examples" / example, example.replace("_", "-")
    metadata = folder / "site" / f"{example}-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    _, _, points = (source / "pyproject.toml").read_text("utf-8").partition("[project.entry-points.")
    group, point = points.replace('"', "").splitlines()[:2]
    (metadata / "entry_points.txt").write_text(f"[{group}\n{point}\n")
    return {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, metadata.parent, source)))}
