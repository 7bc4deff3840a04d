"""What is trained on: images, videos, captioned images, text."""
