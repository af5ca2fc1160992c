"""What is measured of one answer, and the file that keeps it so that an interrupted run goes on where it was."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lopa_ascend.config import DecodingParams, ParameterError

HEADER = "benchmark.json"
SAMPLES = "samples.jsonl"
LOCK = "lock"


@dataclass(frozen=True)
class Setting:
    """One way to decode."""

    params: DecodingParams
    label: str
    """Its name, for people."""

    @property
    def key(self) -> str:
        """Names the parameters' values in files."""
        text = json.dumps(asdict(self.params), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One answer to one problem. Times are seconds by the clock on the wall."""

    setting: str
    """``Setting.key``."""
    run: int
    """Number of the repetition, from 0."""
    index: int
    """Number of the problem in its file, from 0."""
    task: str
    text: str
    visible_tokens: int
    """Tokens of the answer before the token that ends it, as a reader gets them."""
    opened_tokens: int
    """Generated positions that were opened, with EOS and what follows it: what the published Dream code counts."""
    num_forwards: int
    model_tokens: int
    seconds: float
    """From the prompt's text to the whole answer's."""
    first_seconds: float
    """The part of ``seconds`` up to the end of the first forward pass."""
    forward_seconds: float | None
    """The part of ``seconds`` in forward passes and scores; None where steps are compiled, which cannot be divided."""
    host_seconds: float | None
    """With compiled steps: the part of ``seconds`` in which the host writes inputs and reads results."""
    pages: int
    """KV pages that the request held after its first forward pass."""
    graph_tokens: int | None
    """Tokens that compiled steps computed; None without compiled steps."""
    padded_tokens: int | None
    """Tokens among ``graph_tokens`` that no branch needed; None without compiled steps."""
    eager_steps: int | None
    """Forward passes, but for the prompt's, that no compiled step could make; None without compiled steps."""
    filled: tuple[int, ...]
    """Tokens that each forward pass filled, the winning branch's own one included."""
    scores: dict[str, float]
    metric: str
    """The one of ``scores`` that counts."""

    @property
    def score(self) -> float:
        return self.scores[self.metric]

    @property
    def identity(self) -> tuple[str, int, int]:
        """What no two samples have in common."""
        return self.setting, self.run, self.index


class SampleFile:
    """The samples of one benchmark, in a folder with a description of what was measured.

    Each sample is on the disk before the next one begins. A last line that was cut off by an interruption is removed.

    Raises:
        ParameterError: the folder has a benchmark of something else, and the message names what differs; or samples
            without the description of what was measured; or another process writes to it.
    """

    def __init__(self, folder: Path, header: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._lock = (folder / LOCK).open("w")
        self._lock_folder()
        self._check_header(header)
        self._path = folder / SAMPLES
        self.samples: dict[tuple[str, int, int], Sample] = {}
        content = self._path.read_bytes() if self._path.exists() else b""
        whole, _, rest = content.rpartition(b"\n")
        if rest:
            os.truncate(self._path, len(content) - len(rest))
        for line in whole.splitlines():
            sample = _read_sample(json.loads(line))
            self.samples[sample.identity] = sample

    def _lock_folder(self) -> None:
        """Keeps other processes out until this one ends."""
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            message = f"another process writes to {self.folder}; wait until it ends, or choose another folder"
            raise ParameterError("out", message) from None

    def _check_header(self, header: Mapping[str, Any]) -> None:
        """Checks the description of samples that the folder has; without samples, writes the description."""
        if _has_samples(self.folder):
            check_header(self.folder, header)
            return
        path = self.folder / HEADER
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)

    def add(self, sample: Sample) -> None:
        """Keeps a sample."""
        assert sample.identity not in self.samples
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(sample)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.samples[sample.identity] = sample


def _has_samples(folder: Path) -> bool:
    """Whether a folder has samples. A run that failed at its start leaves a header alone."""
    samples = folder / SAMPLES
    return samples.exists() and samples.stat().st_size > 0


def check_header(folder: Path, header: Mapping[str, Any]) -> None:
    """Checks that a folder has no samples of another benchmark.

    Raises:
        ParameterError: it has, and the message names what differs; or nothing says of which benchmark they are.
    """
    if not _has_samples(folder):
        return
    if not (folder / HEADER).exists():
        message = f"{folder} has samples without {HEADER}, which says what was measured; choose another folder"
        raise ParameterError("out", message)
    found = _parts(json.loads((folder / HEADER).read_text(encoding="utf-8")))
    wanted = _parts(json.loads(json.dumps(header)))
    for name in {**found, **wanted}:
        if found.get(name) != wanted.get(name):
            message = (
                f"{folder} holds a benchmark whose {name} is {found.get(name)}, but this one's is {wanted.get(name)}; "
                "choose another folder"
            )
            raise ParameterError("out", message)


def _parts(header: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a header by name, and those of its objects by names such as "machine.cores"."""
    parts: dict[str, Any] = {}
    for name, value in header.items():
        if isinstance(value, dict) and value:
            for inner_name, inner_value in _parts(value).items():
                parts[f"{name}.{inner_name}"] = inner_value
        else:
            parts[name] = value
    return parts


def _read_sample(values: dict[str, Any]) -> Sample:
    return Sample(**{**values, "filled": tuple(values["filled"])})
