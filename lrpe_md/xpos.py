"""Public import path of xPos."""

from .modules.xpos import scale_xpos as scale_xpos
