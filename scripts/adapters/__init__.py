"""Test ``adapt_rotary`` on the models of installed libraries: ``python -m scripts.adapters``."""
