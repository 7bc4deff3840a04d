"""Training, as in ``lrpe-md train TASK``."""
