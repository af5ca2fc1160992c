"""Logits to predictions: (token, probability, confidence) for each masked position."""
