"""The OpenAI-compatible HTTP server, `python -m lopa_ascend.serve`: flags, HTTP API, engine process and metrics."""
