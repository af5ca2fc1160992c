"""Architectures; they take their ops as an argument."""
