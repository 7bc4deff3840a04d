"""Compare encodings by training the same model with each: ``lrpe-md ablate run TASK``."""
