"""The live view at /: a page that shows answers as they grow. Its files lie beside this one."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from http import HTTPStatus
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

PAGE = "index.html"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'self'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
TEXT = """\
An OpenAI-compatible server for a diffusion language model. Clients use {root}/v1; {root}/docs documents every route.
"""


def add_view(app: FastAPI, *, is_shown: bool, examples: Sequence[str]) -> None:
    """The routes of the page. They tell nothing secret, and the page asks for the key. Without ``is_shown``, and for
    clients that do not accept HTML, there is a text; the page offers ``examples``."""
    folder = Path(__file__).parent
    files = {file.name: file.read_bytes() for file in folder.iterdir() if is_shown and file.suffix in TYPES}

    buttons = "".join(f'<button type="button">{escape(question)}</button>' for question in examples)

    def file(name: str, content: bytes) -> Response:
        return Response(content, media_type=TYPES[Path(name).suffix], headers=HEADERS)

    @app.get("/", include_in_schema=False)
    async def home(request: Request) -> Response:
        root = request.scope.get("root_path", "")
        if is_shown and "text/html" in request.headers.get("accept", ""):
            # Relative addresses start at the root, whether or not the page's own address ends with a slash.
            page = files[PAGE].replace(b"{root}", escape(root).encode())
            return file(PAGE, page.replace(b"{examples}", buttons.encode()))
        return PlainTextResponse(TEXT.format(root=root), headers={"Vary": "Accept"})

    @app.get("/view/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        if name not in files:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        return file(name, files[name])
