"""The training of the bundled model, which `scripts/train_demo.py` runs."""
