"""Encodings and linear attention as modules."""

from .encodings import CosineMd as CosineMd
from .encodings import PresetMd as PresetMd
from .encodings import Rotate1d as Rotate1d
from .encodings import RotateMd as RotateMd
from .linear import HeadDecay as HeadDecay
from .linear import LinearAttention as LinearAttention
from .linear import Memory as Memory
