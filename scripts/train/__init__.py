"""Training: ``lrpe-md train TASK``."""
