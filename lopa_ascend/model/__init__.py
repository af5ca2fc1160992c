"""The forward pass of families in the fused ops of a backend, and what a model in plain torch must look like."""
