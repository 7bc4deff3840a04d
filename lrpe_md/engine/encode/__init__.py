"""Encodings: an optional norm, followed by the cosine or rotate map."""
