"""Pictures of encodings: ``python -m scripts.visualize``."""
