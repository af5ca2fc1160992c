"""What the launch scripts share, and the checks that they make first: `python -m scripts.launch`."""
