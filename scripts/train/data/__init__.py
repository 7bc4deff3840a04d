"""Training data, such as images, videos, captioned images and text."""
