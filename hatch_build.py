"""Build hooks: models and scripts in the wheel, an editable install with types, and a long description without paths.

A wheel has models and scripts as lrpe_md.models and lrpe_md.scripts, without the benchmarks and the developers'
programs. An editable install has none of them: ``lrpe_md`` finds them where they are.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

FOLDERS = ("models", "scripts")
CHECKOUT_ONLY = ("adapters", "bench", "fuzz", "host_plugin.py", "host_tests.py", "kernel_hub.py")  # of scripts
EDITABLE = ".editable"  # dev-mode-dirs of pyproject.toml
PICTURES = re.compile(r"<picture>.*?</picture>\n+(?:\*[^*]+\*\n+)?", re.DOTALL)  # with their captions
PATHS = re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]+\)")


class Hook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        if version == "editable":
            link_package(root)
            return
        # Programs alone: nothing reads scripts/results when it runs.
        files = [path.relative_to(root) for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
        files = [path for path in files if path.parts[1] not in CHECKOUT_ONLY]
        build_data["force_include"].update({str(path): str("lrpe_md" / path) for path in files})


def link_package(root: Path) -> None:
    """Make a folder with a link to lrpe_md alone, for the import path of an editable install.

    The folder is on the path instead of the root, from which models, scripts and tests could be imported as well. Type
    checkers follow it, unlike an import hook.
    """
    link = root / EDITABLE / "lrpe_md"
    link.parent.mkdir(exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(Path("..", "lrpe_md"), target_is_directory=True)


class ReadmeHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": drop_paths(text)}


def drop_paths(text: str) -> str:
    """Return a README without what only a checkout has: pictures, and links to files, of which the text stays."""
    return PATHS.sub(r"\1", PICTURES.sub("", text))


def get_build_hook() -> type[BuildHookInterface]:
    return Hook


def get_metadata_hook() -> type[MetadataHookInterface]:
    return ReadmeHook
