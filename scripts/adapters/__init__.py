"""What ``adapt_rotary`` does with the models of the libraries that are installed: ``python -m scripts.adapters``."""
