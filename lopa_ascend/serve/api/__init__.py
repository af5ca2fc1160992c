"""The HTTP API: bodies of requests, answers, streams of events, errors, and the OpenAPI document."""
