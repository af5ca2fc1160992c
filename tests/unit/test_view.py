"""The routes of the live view. tests/view has what the page does in a browser."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from lopa_ascend.serve.http.access import Access
from lopa_ascend.serve.http.api_error import install_handlers
from lopa_ascend.serve.view import add_view

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def client(*, is_shown: bool = True, root: str = "", examples: tuple[str, ...] = (), **access: Any) -> TestClient:
    app = FastAPI()
    install_handlers(app)
    app.add_middleware(Access, **{"api_key": None, **access})
    add_view(app, is_shown=is_shown, examples=examples)
    return TestClient(app, root_path=root)


@pytest.mark.parametrize("root", ["", "/models/a&b"])
def test_the_page_and_all_its_files_come_from_below_the_root(root: str):
    asked = client(root=root)
    page = asked.get(f"{root}/", headers=BROWSER)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert f'<base href="{root.replace("&", "&amp;")}/">' in page.text
    names = set(re.findall(r'(?:src|href)="view/([^"]+)"', page.text))
    files, total = dict[str, Any](), len(page.content)
    while names - files.keys():
        name = (names - files.keys()).pop()
        answer = files[name] = asked.get(f"{root}/view/{name}")
        assert answer.status_code == 200, name
        assert answer.headers["x-content-type-options"] == "nosniff"
        names |= set(re.findall(r'from "\./([^"]+)"', answer.text))
        total += len(answer.content)
    assert {"app.js", "view.css", "run.js"} <= files.keys()
    assert files["app.js"].headers["content-type"].startswith("text/javascript")
    assert total < 200_000
    assert not re.search(r"https?://(?!www\.w3\.org/)", page.text + "".join(answer.text for answer in files.values()))


def test_the_page_may_load_from_its_server_alone():
    policy = client().get("/", headers=BROWSER).headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules.pop("default-src") == rules.pop("frame-ancestors") == "'none'"
    assert all(rules.pop(f"{name}-src") == "'self'" for name in ("script", "style", "img", "connect"))
    assert "unsafe" not in policy


def test_the_page_offers_the_questions_that_it_is_given():
    asked = client(examples=("Is 1 < 2?", "And 3?"))
    page = asked.get("/", headers=BROWSER).text
    assert '<button type="button">Is 1 &lt; 2?</button><button type="button">And 3?</button></div>' in page
    assert 'aria-label="Questions to try"></div>' in client().get("/", headers=BROWSER).text


def test_clients_that_want_no_page_get_a_text():
    shown, hidden = client(), client(is_shown=False)
    for answer in (shown.get("/"), hidden.get("/"), hidden.get("/", headers=BROWSER)):
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain")
        assert "/v1" in answer.text
    for asked, name in ((hidden, "app.js"), (shown, "other.js"), (shown, "__init__.py")):
        assert asked.get(f"/view/{name}").status_code == 404


def test_the_page_needs_no_key_but_a_host_of_this_machine():
    asked = client(api_key="secret")
    assert asked.get("/", headers=BROWSER).status_code == asked.get("/view/app.js").status_code == 200
    for path in ("/view", "/view/app.js/x", "/viewer", "/docs", "/view/../docs"):
        assert asked.get(path).status_code == 401, path
    assert client(hosts={"localhost"}).get("/", headers=BROWSER).status_code == 403
