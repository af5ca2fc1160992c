"""Requests of token ids in, updates out: the engine, its scheduler and its ranks."""
