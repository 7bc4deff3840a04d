"""Programs: train, ablate, bench, visualize. ``lrpe-md NAME`` and, in a checkout, ``python -m scripts.NAME``."""
