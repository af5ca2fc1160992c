"""The OpenAI-compatible HTTP server: `python -m lopa_ascend.serve`."""
