"""Public import path of :func:`scale_xpos`."""

from .modules.xpos import scale_xpos as scale_xpos
