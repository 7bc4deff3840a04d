"""Relative positions on any number of axes for vision and video transformers."""

from .frequencies import axial_omega as axial_omega
from .frequencies import geometric_theta as geometric_theta
from .frequencies import mixed_omega as mixed_omega
from .functional import cosine as cosine
from .functional import rotate as rotate
from .modules import CosineMd as CosineMd
from .modules import Rotate1d as Rotate1d
from .modules import RotateMd as RotateMd
from .positions import Coordinates as Coordinates
from .positions import Grid as Grid

__version__ = "0.1.0"
