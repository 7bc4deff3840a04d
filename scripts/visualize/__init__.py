"""Plots of encodings: ``lrpe-md visualize``."""
