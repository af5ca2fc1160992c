"""One decode step: layout of a batch, forward pass, scores, decisions."""
