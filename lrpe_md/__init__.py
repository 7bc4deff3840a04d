"""Relative positions on any number of axes for vision and video transformers."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .frequencies.axial import axial_omega as axial_omega
from .frequencies.dense import dense_omega as dense_omega
from .frequencies.rope_parameters import rope_frequencies as rope_frequencies
from .frequencies.series import geometric_theta as geometric_theta
from .functional import cosine as cosine
from .functional import rotate as rotate
from .functional_linear import linear_attention as linear_attention
from .modules.encodings import CosineMd as CosineMd
from .modules.encodings import PresetMd as PresetMd
from .modules.encodings import Rotate1d as Rotate1d
from .modules.encodings import RotateMd as RotateMd
from .modules.linear import LinearAttention as LinearAttention
from .norm import Norm as Norm
from .optim import parameter_groups as parameter_groups
from .pairs import convert_pairs as convert_pairs
from .positions.augment import AugmentPositions as AugmentPositions
from .positions.coordinates import Coordinates as Coordinates
from .positions.grid import Grid as Grid
from .positions.grid import window_order as window_order
from .positions.sequences import After as After
from .positions.sequences import Before as Before
from .positions.sequences import Tokens as Tokens
from .positions.sequences import compose as compose
from .positions.sequences import pack as pack
from .positions.sequences import pad as pad
from .presets.registry import list_presets as list_presets
from .presets.registry import preset as preset
from .presets.registry import register_scheme as register_scheme
from .presets.scheme import Axial as Axial
from .presets.scheme import Dense as Dense
from .presets.scheme import Scheme as Scheme

if TYPE_CHECKING:  # what __getattr__ finds
    from .document import lrpe_cosine_md as lrpe_cosine_md
    from .document import lrpe_cosine_md_bwd_triton as lrpe_cosine_md_bwd_triton
    from .document import lrpe_cosine_md_cache_bwd_triton as lrpe_cosine_md_cache_bwd_triton
    from .document import lrpe_cosine_md_cache_fwd_triton as lrpe_cosine_md_cache_fwd_triton
    from .document import lrpe_cosine_md_cache_triton as lrpe_cosine_md_cache_triton
    from .document import lrpe_cosine_md_fwd_triton as lrpe_cosine_md_fwd_triton
    from .document import lrpe_cosine_md_torch as lrpe_cosine_md_torch
    from .document import lrpe_cosine_md_triton as lrpe_cosine_md_triton
    from .document import lrpe_rotate_1d as lrpe_rotate_1d
    from .document import lrpe_rotate_1d_bwd_triton as lrpe_rotate_1d_bwd_triton
    from .document import lrpe_rotate_1d_fwd_triton as lrpe_rotate_1d_fwd_triton
    from .document import lrpe_rotate_1d_torch as lrpe_rotate_1d_torch
    from .document import lrpe_rotate_1d_triton as lrpe_rotate_1d_triton
    from .document import lrpe_rotate_md as lrpe_rotate_md
    from .integrations import adapt as adapt
    from .integrations import adapt_rotary as adapt_rotary
    from .presets.picture import show as show

__version__ = "0.2.0"

# In a checkout the backbones and the commands lie beside the package, and are lrpe_md.models and lrpe_md.scripts
# nevertheless; a wheel has them inside.
_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "pyproject.toml").is_file() and (_ROOT / "models").is_dir():
    __path__.append(str(_ROOT))

_INTEGRATIONS = ("adapt", "adapt_rotary")
_DOCUMENT = (
    "lrpe_cosine_md", "lrpe_cosine_md_bwd_triton", "lrpe_cosine_md_cache_bwd_triton",
    "lrpe_cosine_md_cache_fwd_triton", "lrpe_cosine_md_cache_triton", "lrpe_cosine_md_fwd_triton",
    "lrpe_cosine_md_torch", "lrpe_cosine_md_triton", "lrpe_rotate_1d", "lrpe_rotate_1d_bwd_triton",
    "lrpe_rotate_1d_fwd_triton", "lrpe_rotate_1d_torch", "lrpe_rotate_1d_triton", "lrpe_rotate_md",
)  # fmt: skip
# Names that are imported when they are first used: most programs don't need them.
_LAZY = {
    "show": ".presets.picture",
    **dict.fromkeys(_INTEGRATIONS, ".integrations"),
    **dict.fromkeys(_DOCUMENT, ".document"),
}
_EAGER = {name for name, value in globals().items() if str(getattr(value, "__module__", "")).startswith(__name__)}
# Without adapt, so that a star import does not need timm.
__all__ = sorted({name for name in {*_EAGER, *_LAZY} if not name.startswith("_")} - {"adapt"})  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: the LRPE document's names, and modules that need other libraries."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return all names, those not imported yet included."""
    return sorted({*globals(), *_LAZY})
