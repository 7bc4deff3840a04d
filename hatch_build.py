"""Build hook that adds models and scripts to the wheel: lrpe_md.models and lrpe_md.scripts.

An editable install has none of them: ``lrpe_md`` finds them where they are.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDERS = ("models", "scripts")


class Hook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        root = Path(self.root)
        # Programs alone: nothing reads scripts/results when it runs.
        files = [path.relative_to(root) for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
        build_data["force_include"].update({str(path): str("lrpe_md" / path) for path in files})
