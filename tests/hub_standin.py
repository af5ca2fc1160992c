"""A stand-in for the Hugging Face hub: the routes, headers and errors that huggingface_hub meets there.

Weights are redirected to another host, the CDN (this server under another name), as the hub does it with large files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import NamedTuple
from urllib.parse import unquote

LARGE = {
    "model_type": "Dream", "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rope_theta": 1e6, "rms_norm_eps": 1e-6, "mask_token_id": 151666, "eos_token_id": 151643, "torch_dtype": "bfloat16",
}  # fmt: skip
"""A Dream with the sizes of Qwen2.5-72B: 145 GB in bfloat16."""
TOTAL = 145_412_407_296
"""Bytes."""
COMMITS = {"main": "a" * 40, "v1": "b" * 40}
"""The commits that every repository has."""


class Asked(NamedTuple):
    """A request that came."""

    method: str
    path: str
    token: str | None
    range: str | None


@dataclass
class HeldRepository:
    """A repository: the files of a folder."""

    folder: Path
    gated_for: str | None = None
    """The token of the only one who may download."""
    is_private: bool = False
    claimed: Mapping[str, int] = field(default_factory=dict)
    """Sizes of files that are listed, but not there."""

    def sizes(self) -> dict[str, int]:
        return {file.name: file.stat().st_size for file in self.folder.iterdir()} | dict(self.claimed)


@dataclass
class Hub:
    """The running stand-in."""

    repositories: dict[str, HeldRepository]
    asked: list[Asked] = field(default_factory=list)
    cuts: dict[str, int] = field(default_factory=dict)
    """By file: bytes after which the CDN closes the connection, once."""
    status: int = 200
    """What the API answers, if it is an error."""
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self, cache: Path, **more: str) -> dict[str, str]:
        """The environment of a process that is to use this hub."""
        own = {"HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
        return own | more

    def downloaded(self) -> list[str]:
        """The files whose content was asked for, each once."""
        paths = (asked.path for asked in self.asked if asked.method == "GET" and not asked.path.startswith("/api/"))
        return sorted({path.rpartition("/")[2] for path in paths})


def large_repository(folder: Path) -> HeldRepository:
    """A repository that claims to have ``LARGE``, of which there are only the JSON files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LARGE))
    shards = [f"model-{number:05}-of-00030.safetensors" for number in range(1, 31)]
    index = {"metadata": {"total_size": TOTAL}, "weight_map": {f"t{n}": shard for n, shard in enumerate(shards)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return HeldRepository(folder, claimed=dict.fromkeys(shards, TOTAL // 30))


@contextmanager
def running_hub(**repositories: HeldRepository) -> Iterator[Hub]:
    """A hub with these repositories of the organisation "org"."""
    hub = Hub({f"org/{name}": repository for name, repository in repositories.items()})
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        hub.port = server.server_port
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield hub
        server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        token = self.headers.get("Authorization")
        self.hub.asked.append(Asked(self.command, path, token, self.headers.get("Range")))
        if match := re.fullmatch(r"/cdn/(\w+/[\w.-]+)/(.+)", path):
            self._send_file(match[1], match[2])
        elif match := re.fullmatch(r"/api/models/(\w+/[\w.-]+)/(revision|tree)/(.+)", path):
            self._describe(*match.groups(), with_sizes="blobs=" in self.path)
        elif match := re.fullmatch(r"/(\w+/[\w.-]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(*match.groups())
        else:
            self._refuse(404, "RepoNotFound")

    def _find(self, name: str, revision: str) -> tuple[HeldRepository, str] | None:
        """The repository and the commit; None if they are refused."""
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and not token.startswith("hf_"):
            self._refuse(401, None, "Invalid credentials in Authorization header")
            return None
        held = self.hub.repositories.get(name)
        if held is None or (held.is_private and not token):
            self._refuse(404, "RepoNotFound") if token else self._refuse(401, None, "Invalid username or password.")
            return None
        commit = COMMITS.get(revision, revision if revision in COMMITS.values() else None)
        if commit is None:
            self._refuse(404, "RevisionNotFound")
            return None
        return held, commit

    def _describe(self, name: str, what: str, revision: str, *, with_sizes: bool) -> None:
        if self.hub.status != 200:
            self._refuse(self.hub.status, None)
            return
        if (found := self._find(name, revision)) is None:
            return
        held, commit = found
        if what == "tree":
            entries = [
                {"type": "file", "path": file, "size": size, "oid": hashlib.sha1(file.encode()).hexdigest()}
                for file, size in held.sizes().items()
            ]
            self._send_json(entries)
            return
        siblings = [
            {"rfilename": file, **({"size": size} if with_sizes else {})} for file, size in held.sizes().items()
        ]
        self._send_json({"id": name, "modelId": name, "sha": commit, "siblings": siblings, "private": held.is_private})

    def _resolve(self, name: str, revision: str, file: str) -> None:
        if (found := self._find(name, revision)) is None:
            return
        held, commit = found
        if held.gated_for is not None and (token := self.headers.get("Authorization")) != f"Bearer {held.gated_for}":
            self._refuse(401 if token is None else 403, "GatedRepo", f"Access to model {name} is restricted.")
            return
        path, own = held.folder / file, {"X-Repo-Commit": commit}
        if not path.exists():
            self._refuse(404, "EntryNotFound", **own)
            return
        etag = f'"{hashlib.sha256(path.read_bytes()).hexdigest()}"'
        if file.endswith(".safetensors"):
            self.send_response(302)
            size, location = str(path.stat().st_size), f"http://localhost:{self.hub.port}/cdn/{name}/{file}"
            own |= {"X-Linked-Size": size, "X-Linked-ETag": etag, "Location": location, "Content-Length": "0"}
            self._end(own)
        else:
            self._send(path.read_bytes(), {**own, "ETag": etag})

    def _send_file(self, name: str, file: str) -> None:
        if self.headers.get("Authorization"):  # the hub's secret is none of the CDN's business
            self._refuse(400, None)
            return
        content = (self.hub.repositories[name].folder / file).read_bytes()
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        self.send_response(206 if first else 200)
        span = {"Content-Range": f"bytes {first}-{len(content) - 1}/{len(content)}"} if first else {}
        self._end({"Content-Length": str(len(content) - first), "Accept-Ranges": "bytes", **span})
        if (cut := self.hub.cuts.pop(file, None)) is not None:
            self.wfile.write(content[first : first + cut])
            self.close_connection = True
        elif self.command == "GET":
            self.wfile.write(content[first:])

    def _send_json(self, value: object) -> None:
        self._send(json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(200)
        self._end({**headers, "Content-Length": str(len(content))})
        if self.command == "GET":
            self.wfile.write(content)

    def _refuse(self, status: int, code: str | None, message: str = "refused", **headers: str) -> None:
        content = json.dumps({"error": message}).encode()
        self.send_response(status)
        named = {} if code is None else {"X-Error-Code": code}
        self._end({**headers, **named, "X-Error-Message": message, "Content-Length": str(len(content))})
        if self.command == "GET":
            self.wfile.write(content)

    def _end(self, headers: Mapping[str, str]) -> None:
        for name, value in {**headers, "Connection": "close"}.items():  # a client notices when the stand-in has ended
            self.send_header(name, value)
        self.end_headers()
