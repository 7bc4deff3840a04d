"""Training data: images, videos, captioned images, text."""
