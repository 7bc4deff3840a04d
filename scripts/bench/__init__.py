"""Benchmarks: ``python -m scripts.bench NAME``."""
