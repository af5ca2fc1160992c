"""The self-test of NPUs: `python -m scripts.selftest --help`."""
