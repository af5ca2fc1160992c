"""What browsers and clients of other servers ask for: pages without internet, other origins, further routes."""

import re
from pathlib import Path

import httpx

from tests.e2e.conftest import ServerProcess, running


def test_pages_load_nothing_from_other_hosts(server: ServerProcess):
    docs = server.http.get("/docs")
    for page in (docs, server.http.get("/redoc")):
        addresses = re.findall(r"""(?:src|href|url)\s*[=:]\s*["']([^"']+)["']""", page.text)
        assert addresses
        for address in addresses:
            assert address.startswith("/"), address
            assert server.http.get(address).status_code == 200, address
    scripts = re.findall(r'<script src="([^"]+)"', docs.text)
    assert all(len(server.http.get(script).content) > 100_000 for script in scripts)


def test_the_live_view_is_at_the_root_unless_it_is_switched_off(server: ServerProcess, model_dir: Path):
    browser = {"Accept": "text/html"}
    assert '<script type="module" src="view/app.js">' in server.http.get("/", headers=browser).text
    with running("--model", str(model_dir), "--no-ui") as process:
        assert "/docs" in process.http.get("/", headers=browser).text
        assert process.http.get("/view/app.js").status_code == 404


def preflight(http: httpx.Client, origin: str) -> httpx.Response:
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    headers["Access-Control-Request-Headers"] = "authorization,content-type"
    return http.options("/v1/chat/completions", headers=headers)


def test_pages_from_this_machine_alone_may_call_by_default(server: ServerProcess):
    for origin in ("http://localhost:3000", "http://127.0.0.1", "https://[::1]:8443"):
        allowed = preflight(server.http, origin)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, origin)
        answer = server.http.get("/v1/models", headers={"Origin": origin})
        assert answer.headers["access-control-allow-origin"] == origin
    for origin in ("https://example.org", "http://localhost.example.org", "http://localhost:1@example.org", "null"):
        assert preflight(server.http, origin).status_code == 400
        assert "access-control-allow-origin" not in server.http.get("/v1/models", headers={"Origin": origin}).headers


def test_named_origins_may_call_and_preflights_need_no_key(model_dir: Path):
    arguments = ("--model", str(model_dir), "--allowed-origins", "https://example.org", "--api-key", "secret")
    with running(*arguments) as process:
        allowed = preflight(process.http, "https://example.org")
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://example.org")
        assert preflight(process.http, "http://localhost:3000").status_code == 400
        refused = process.http.get("/v1/models", headers={"Origin": "https://example.org"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://example.org"


def test_routes_of_other_servers(server: ServerProcess):
    assert server.http.get("/health_generate").json() == {"status": "ok"}
    assert server.http.get("/get_model_info").json()["model_path"] == "tiny"
    for model in ("default", "tiny", None):
        body = {"model": model, "prompt": "hi", "max_tokens": 2}
        assert server.http.post("/v1/completions", json=body).json()["model"] == "tiny"
    assert server.http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    mask = server.http.get("/server_info").json()["limits"]["mask_token_id"]
    text = server.http.post("/detokenize", json={"tokens": [mask]}).json()["prompt"]
    messages = [{"role": "user", "content": text}]
    assert server.http.post("/tokenize", json={"prompt": text}).json()["tokens"] == [mask]
    tokens = server.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert mask not in tokens  # in a message its text stays text
    assert text in server.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
