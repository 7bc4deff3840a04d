"""Code that the encoding and linear attention share, from a call to its launches."""
