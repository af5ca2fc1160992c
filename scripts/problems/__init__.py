"""The language of the bundled model's problems, from which `scripts/demo_problems.py` makes them."""
