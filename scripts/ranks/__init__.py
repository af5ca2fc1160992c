"""What `scripts/bench_parallel.py` reports about several ranks: what they send, and how work divides among them."""
