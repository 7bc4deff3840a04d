"""Training: ``python -m scripts.train TASK``."""
