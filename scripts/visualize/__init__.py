"""Plots of encodings, as in ``lrpe-md visualize``."""
