"""Benchmarks: ``lrpe-md bench NAME``."""
