"""The path by which pickles of version 0.2 name LinearAttention."""

from .modules.linear import LinearAttention as LinearAttention
