"""Old import path of LinearAttention, kept for pickles from version 0.2."""

from .modules.linear import LinearAttention as LinearAttention
