"""What the encoding and linear attention have in common, from a call to its launches."""
