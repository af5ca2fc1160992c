"""Measures and predicts speed: ``python -m scripts.bench``."""
