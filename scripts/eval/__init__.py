"""Evaluates models: the bundled one, published benchmarks, the tables of the LoPA paper, and what W8A8 costs."""
