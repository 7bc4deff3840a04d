"""Former module of LinearAttention, which pickles of version 0.2 refer to."""

from .modules.linear import LinearAttention as LinearAttention
