"""Benchmarks, as in ``lrpe-md bench NAME``."""
