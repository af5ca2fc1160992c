"""Evaluates models: the bundled one, published tasks and the tables of the LoPA paper; and quantises them."""
