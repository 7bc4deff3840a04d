"""Figures of encodings, for :func:`lrpe_md.show` and ``lrpe-md visualize``."""
