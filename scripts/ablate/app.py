"""``python -m scripts.ablate``."""

from .digits import app as app
