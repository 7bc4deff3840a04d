"""Helper functions that the programs share."""
