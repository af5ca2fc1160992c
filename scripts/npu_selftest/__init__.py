"""The self-test of NPUs: see ``__main__``."""
