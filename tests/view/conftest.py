"""A real Chromium, and servers whose page it opens. ci/view.sh runs these tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ServerProcess, model_dir, poisoned_dir, running  # noqa: F401  # two are fixtures

api = pytest.importorskip("playwright.sync_api", reason="playwright is missing; ci/view.sh installs it")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SLOW = ("--decoding", "d2f", "--tau-conf", "1", "--tau-add", "1", "--block-size", "8", "--ignore-eos")
"""With random weights: a pass for each position."""


def arguments() -> list[str]:
    """Chromium's: it has no sandbox for root."""
    return ["--no-sandbox"] if os.geteuid() == 0 else []


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium; ci/view.sh says how to install it")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments())
        yield browser
        browser.close()


class Pages:
    """Opens pages, and notes what they must not do."""

    def __init__(self, browser: Any):
        self._browser = browser
        self.contexts: list[Any] = []
        self.faults: list[str] = []
        """Errors of scripts, breaches of the content policy, and requests to other origins."""

    def __call__(self, url: str, **options: Any) -> Any:
        """A page in a new session of the browser."""
        context = self._browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        context.set_default_timeout(30_000)
        self.contexts.append(context)
        page, origin = context.new_page(), url.split("#")[0]
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("console", lambda message: self._read(message.text))
        page.on("request", lambda request: self._check(request.url, origin))
        page.goto(url)
        return page

    def _read(self, message: str) -> None:
        if "Policy" in message:
            self.faults.append(message)

    def _check(self, url: str, origin: str) -> None:
        if not url.startswith((origin, f"blob:{origin}")):
            self.faults.append(f"request to {url}")


@pytest.fixture
def pages(browser: Any) -> Iterator[Pages]:
    opener = Pages(browser)
    yield opener
    for context in opener.contexts:
        context.close()
    assert opener.faults == []


@pytest.fixture(scope="session")
def demo() -> Iterator[ServerProcess]:
    """The bundled model."""
    with running("--tau-conf", "0.99") as process:
        yield process


@pytest.fixture
def slow(model_dir: Path) -> Iterator[ServerProcess]:  # noqa: F811
    """An answer takes seconds."""
    with running("--model", str(model_dir), *SLOW, "--max-new-tokens", "2000") as process:
        yield process
