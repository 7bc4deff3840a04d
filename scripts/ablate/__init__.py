"""Compare encodings by training the same model with each: ``python -m scripts.ablate run TASK``."""
