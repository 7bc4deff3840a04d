"""Multi-dimensional relative position encodings for vision and video transformers."""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The console command imports names lazily, so its help does not wait for torch. All other programs import every
# name now, because operators must be registered before a saved program is loaded.
_IS_COMMAND = Path(sys.argv[0]).stem == "lrpe-md" if sys.argv else False
if TYPE_CHECKING or not _IS_COMMAND:
    from .names import *  # noqa: F403

if TYPE_CHECKING:  # resolved by __getattr__
    from .document import *  # noqa: F403
    from .integrations import adapt as adapt
    from .integrations import adapt_attention as adapt_attention
    from .integrations import adapt_rotary as adapt_rotary
    from .picture.plot import show as show

__version__ = "0.3.0"

# In a wheel, models and scripts are inside the package. In a checkout, they are next to the package, so __path__ is
# extended to make them importable as lrpe_md.models and lrpe_md.scripts.
_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "pyproject.toml").is_file() and (_ROOT / "models").is_dir():
    __path__.append(str(_ROOT))  # noqa: F405

_INTEGRATIONS = ("adapt", "adapt_attention", "adapt_rotary")
_DOCUMENT = (
    "lrpe_cosine_md", "lrpe_cosine_md_bwd_triton", "lrpe_cosine_md_cache_bwd_triton",
    "lrpe_cosine_md_cache_fwd_triton", "lrpe_cosine_md_cache_triton", "lrpe_cosine_md_fwd_triton",
    "lrpe_cosine_md_torch", "lrpe_cosine_md_triton", "lrpe_rotate_1d", "lrpe_rotate_1d_bwd_triton",
    "lrpe_rotate_1d_fwd_triton", "lrpe_rotate_1d_torch", "lrpe_rotate_1d_triton", "lrpe_rotate_md",
)  # fmt: skip
# Names imported on first use, because most programs don't need them.
_LAZY = {
    "show": ".picture.plot",
    **dict.fromkeys(_INTEGRATIONS, ".integrations"),
    **dict.fromkeys(_DOCUMENT, ".document"),
}
_EAGER = {name for name, value in globals().items() if str(getattr(value, "__module__", "")).startswith(__name__)}


def _list_public(names: Any) -> list[str]:
    """Return the names for a star import, without adapt, which would need timm."""
    return sorted({name for name in {*names, *_LAZY} if not name.startswith("_")} - {"adapt"})


if not _IS_COMMAND:  # otherwise, __getattr__ returns the list
    __all__ = _list_public(_EAGER)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a lazily loaded name when it is first used."""
    if _IS_COMMAND and name == "__all__":
        return _list_public(vars(importlib.import_module(".names", __name__)))
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    if _IS_COMMAND and not name.startswith("_"):
        return getattr(importlib.import_module(".names", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return all public names, including names that are not imported yet."""
    return sorted({*globals(), *_LAZY})
