"""Model architectures, written in the fused ops of a backend."""
