"""Takes the pictures of the live view in docs/: ci/view.sh --screenshots"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.conftest import ROOT, running
from tests.view.conftest import CHROMIUM, api, arguments

QUESTION = "There are 12 eggs in a carton. Mum buys 3 cartons and uses 7 eggs for a cake. How many eggs remain?"
SIZE = {"width": 1180, "height": 760}


def main() -> None:
    with running() as server, api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments())
        with answered(browser, f"{server.url}/#compare=1&a.decoding=d2f&b.decoding=lopa", "light") as page:
            taken(page, passes=2, path=ROOT / "docs/view-compare.png")
        with answered(browser, f"{server.url}/#a.num_branches=7&a.tau_conf=0.99", "dark") as page:
            taken(page, passes=2, path=ROOT / "docs/view-pass.png")


@contextmanager
def answered(browser: Any, url: str, scheme: str) -> Iterator[Any]:
    """A page with the answer to the question."""
    page = browser.new_page(viewport=SIZE, color_scheme=scheme)
    page.goto(url)
    page.wait_for_selector("#send:enabled")
    page.fill("#question", QUESTION)
    page.press("#question", "Enter")
    while "pass" not in page.inner_text("#status"):
        page.wait_for_timeout(50)
    page.click("#settings summary")
    yield page


def taken(page: Any, passes: int, path: Path) -> None:
    page.locator("#scrub").focus()
    for key in ("Home", *["ArrowRight"] * passes):
        page.keyboard.press(key)
    page.screenshot(path=path)


if __name__ == "__main__":
    main()
