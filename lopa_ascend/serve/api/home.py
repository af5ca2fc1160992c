"""The page at /, for people who open the server in a browser."""

from __future__ import annotations

from html import escape

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{model} - LoPA-Dist-Ascend</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 40rem; margin: 3rem auto; padding: 0 1rem; }}
code {{ background: #8881; padding: 0 .2em; }}
</style>
</head>
<body>
<h1>{model}</h1>
<p>{status}</p>
<p>An OpenAI-compatible server for a diffusion language model. Point a client to <code>{root}/v1</code>.</p>
<ul>
{links}
</ul>
</body>
</html>
"""
LINKS = {
    "/docs": "API documentation, with a form for every route",
    "/v1/models": "the served model",
    "/server_info": "the configuration in effect",
    "/metrics": "Prometheus metrics",
    "/health": "whether the engine makes progress",
}


def home_page(model: str, problem: str | None, root: str) -> str:
    """The page as HTML.

    Args:
        model: name of the served model.
        problem: why the server cannot serve; None: it can.
        root: path under which a proxy shows this server.
    """
    root = escape(root)
    status = "Ready." if problem is None else f"Not ready: {escape(problem)}."
    links = "\n".join(f'<li><a href="{root}{path}">{path}</a>: {text}</li>' for path, text in LINKS.items())
    return PAGE.format(model=escape(model), status=status, root=root, links=links)
