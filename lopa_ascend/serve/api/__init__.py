"""The HTTP API: request bodies, answers, events, errors and the OpenAPI document."""
