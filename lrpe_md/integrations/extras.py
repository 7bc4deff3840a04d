"""Libraries that are not ours to require: an extra of this package each."""

from __future__ import annotations

from importlib.util import find_spec

__all__ = ["require"]


def require(library: str) -> None:
    """Say what to install, in a ModuleNotFoundError, where ``library`` is missing, which is the extra's name, too."""
    try:
        found = find_spec(library)
    except ValueError:  # a module without a spec
        found = True
    if not found:
        raise ModuleNotFoundError(
            f"{library}: expected it to be installed; pip install 'lrpe-md[{library}]'", name=library
        )
