"""Training tasks, one module each."""
