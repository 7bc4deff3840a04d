"""Compare encodings by training the same model with each, as in ``lrpe-md ablate run TASK``."""
