"""Which encoding? ``python -m scripts.ablate run TASK``."""
