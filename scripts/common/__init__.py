"""What the programs share."""
