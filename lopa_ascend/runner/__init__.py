"""One decode step: a batch, forward pass, scores, decisions."""
