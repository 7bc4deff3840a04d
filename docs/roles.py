"""Render roles of docstrings, :func:`name`, as code: a griffe extension."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

ROLE = re.compile(r":\w+:`~?\.*([^`]+)`")


class Roles(Extension):
    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value).replace("``", "`")
