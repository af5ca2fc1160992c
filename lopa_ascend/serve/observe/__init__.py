"""Measurements for operators: Prometheus metrics, and the times of each request."""
