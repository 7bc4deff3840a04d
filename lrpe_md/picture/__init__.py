"""Figures of encodings: :func:`lrpe_md.show`, shared with ``lrpe-md visualize``."""
