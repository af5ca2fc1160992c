"""Independent judges: they test a running server from outside. `python -m tests.judges --help` names them."""
