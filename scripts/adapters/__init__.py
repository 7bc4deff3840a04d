"""Test ``adapt_rotary`` on the models of installed libraries: ``lrpe-md adapters``."""
