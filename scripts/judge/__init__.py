"""The independent judges of the server: `python -m scripts.judge --help`."""
