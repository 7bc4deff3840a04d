"""The encoding: an optional norm, then the cosine or rotate map."""
