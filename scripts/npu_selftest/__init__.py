"""The self-test of NPUs: `python -m scripts.npu_selftest --help`."""
