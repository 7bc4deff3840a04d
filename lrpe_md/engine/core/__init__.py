"""Code that encodings and linear attention share."""
