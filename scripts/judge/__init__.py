"""Independent judges: they test a running server from outside. `python -m scripts.judge --help` names them."""
