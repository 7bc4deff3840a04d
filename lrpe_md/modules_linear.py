"""Old import path of LinearAttention, which pickles from version 0.2 need."""

from .modules.linear import LinearAttention as LinearAttention
