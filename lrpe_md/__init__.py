"""Relative positions on any number of axes for vision and video transformers."""

from .frequencies import axial_omega as axial_omega
from .frequencies import geometric_theta as geometric_theta
from .frequencies import mixed_omega as mixed_omega
from .functional import cosine as cosine
from .functional import rotate as rotate
from .lrpe import lrpe_cosine_md as lrpe_cosine_md
from .lrpe import lrpe_cosine_md_bwd_triton as lrpe_cosine_md_bwd_triton
from .lrpe import lrpe_cosine_md_cache_bwd_triton as lrpe_cosine_md_cache_bwd_triton
from .lrpe import lrpe_cosine_md_cache_fwd_triton as lrpe_cosine_md_cache_fwd_triton
from .lrpe import lrpe_cosine_md_cache_triton as lrpe_cosine_md_cache_triton
from .lrpe import lrpe_cosine_md_fwd_triton as lrpe_cosine_md_fwd_triton
from .lrpe import lrpe_cosine_md_torch as lrpe_cosine_md_torch
from .lrpe import lrpe_cosine_md_triton as lrpe_cosine_md_triton
from .lrpe import lrpe_rotate_1d as lrpe_rotate_1d
from .lrpe import lrpe_rotate_1d_bwd_triton as lrpe_rotate_1d_bwd_triton
from .lrpe import lrpe_rotate_1d_fwd_triton as lrpe_rotate_1d_fwd_triton
from .lrpe import lrpe_rotate_1d_torch as lrpe_rotate_1d_torch
from .lrpe import lrpe_rotate_1d_triton as lrpe_rotate_1d_triton
from .lrpe import lrpe_rotate_md as lrpe_rotate_md
from .modules import CosineMd as CosineMd
from .modules import Rotate1d as Rotate1d
from .modules import RotateMd as RotateMd
from .positions import Coordinates as Coordinates
from .positions import Grid as Grid

__version__ = "0.1.0"
