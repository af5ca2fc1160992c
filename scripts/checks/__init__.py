"""The checks that `scripts/preflight.py` makes before a launch."""
