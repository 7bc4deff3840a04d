"""The encoding: both maps, and a norm in front of them."""
