"""Command-line programs. Run ``lrpe-md NAME`` or, in a checkout, ``python -m scripts.NAME``."""
