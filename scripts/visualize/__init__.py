"""Plots of encodings: ``python -m scripts.visualize``."""
