"""Real server processes on tiny random models."""

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import SPECIAL, VOCAB_SIZE, write_dream, write_tokenizer

ROOT = Path(__file__).resolve().parents[2]
POISON = 5
"""The token id that makes logits infinite in ``poisoned_server``'s model."""


class Lines:
    """The lines of a pipe, read as they come, so that the writer never has to wait for a reader."""

    def __init__(self, pipe: IO[str]):
        self.seen: list[str] = []
        self._new: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self._thread.start()

    def _read(self, pipe: IO[str]) -> None:
        for line in pipe:
            self.seen.append(line)
            self._new.put(line)
        self._new.put(None)

    def next(self) -> str | None:
        """The next line, None at the end. For one reader."""
        return self._new.get(timeout=120)

    def all(self) -> str:
        """Everything, once the pipe was closed."""
        self._thread.join(timeout=10)
        return "".join(self.seen)


def command_line(process: str) -> bytes:
    """Empty if the process has ended."""
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes()
    return b""


class ServerProcess:
    """`python -m lopa_ascend.serve` on a free port, or on a Unix socket."""

    def __init__(
        self,
        *arguments: str,
        wait: bool = True,
        env: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
        command: tuple[str, ...] = (sys.executable, "-m", "lopa_ascend.serve"),
        cwd: Path = ROOT,
    ):
        # Not OpenMP's default threads: a busy machine would make every step slow.
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
        address = () if "--uds" in arguments else ("--port", "0")
        command = (*prefix, *command, *address, *arguments)
        self.process = subprocess.Popen(
            command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.stdout, self.stderr = Lines(self.process.stdout), Lines(self.process.stderr)
        self.greeting = ""
        if wait:
            try:
                self._await_greeting()
            except BaseException:
                self.process.kill()
                raise

    def _await_greeting(self) -> None:
        while (line := self.stdout.next()) is not None:
            self.greeting += line
            if line.startswith("curl "):
                break
        else:
            raise AssertionError(f"the server did not start:\n{self.stderr.all()}")
        self.url = self.greeting.partition("serving   ")[2].split()[0]
        transport = httpx.HTTPTransport(uds=self.url) if self.url.startswith("/") else None
        self.http = httpx.Client(
            base_url="http://any.example" if transport else self.url, transport=transport, timeout=60
        )
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    @property
    def engines(self) -> list[int]:
        """The children of the main thread that hold a model; a child is another's copy until it runs its program."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children if b"link.process" in command_line(child)]

    @property
    def engine_pid(self) -> int:
        """The process that holds the model: the only child of the one that speaks HTTP."""
        (engine,) = self.engines
        return engine

    def stop(self, signal_number: int) -> tuple[int, str]:
        """Exit status and stderr; raises subprocess.TimeoutExpired after 5 s."""
        self.process.send_signal(signal_number)
        status = self.process.wait(timeout=5)
        return status, self.stderr.all()


@contextmanager
def running(*arguments: str, **options: Any) -> Iterator[ServerProcess]:
    server = ServerProcess(*arguments, **options)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_tokenizer(path)
    # As Dream has it: logits wider than the tokenizer, whose last id is the mask.
    return write_dream(
        path,
        vocab_size=VOCAB_SIZE + 8,
        mask_token_id=VOCAB_SIZE - 1,
        eos_token_id=VOCAB_SIZE - len(SPECIAL),
        max_position_embeddings=4096,
    )


@pytest.fixture(scope="session")
def poisoned_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No tokenizer, and prompts that hold ``POISON`` give logits that are not finite."""
    path = tmp_path_factory.mktemp("models") / "poisoned"
    write_dream(path)
    weights = load_file(path / "model.safetensors")
    _poison(weights)
    save_file(weights, path / "model.safetensors")
    return path


def _poison(weights: dict[str, torch.Tensor]) -> None:
    """Sets finite weights with which one feature of the hidden state is 0 unless ``POISON`` is in the prompt. The first
    layer spreads the feature to all later positions, and the LM head multiplies it by more than a float32 can hold."""
    feature = 3
    weights["model.embed_tokens.weight"][:, feature] = 0
    weights["model.embed_tokens.weight"][POISON, feature] = 1
    for layer in (0, 1):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"model.layers.{layer}.{name}.weight"][feature] = 0
    first = "model.layers.0.self_attn"
    weights[f"{first}.v_proj.weight"][0] = 0
    weights[f"{first}.v_proj.bias"][0] = 0
    weights[f"{first}.v_proj.weight"][0, feature] = 1
    weights[f"{first}.o_proj.weight"][feature, 0] = 1e6
    weights["lm_head.weight"][0, feature] = 3e38


@pytest.fixture(scope="session")
def server(model_dir: Path) -> Iterator[ServerProcess]:
    with running("--model", str(model_dir)) as process:
        yield process


@pytest.fixture(scope="session")
def poisoned_server(poisoned_dir: Path) -> Iterator[ServerProcess]:
    with running("--model", str(poisoned_dir), "--served-model-name", "ids-only", "--max-new-tokens", "8") as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return server.openai
