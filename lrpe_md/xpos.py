"""Public import path of xPos, :func:`scale_xpos`."""

from .modules.xpos import scale_xpos as scale_xpos
