"""The forward pass of families in a backend's fused ops, and what a model in plain torch must look like."""
