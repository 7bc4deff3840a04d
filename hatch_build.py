"""Build hooks for the wheel, the editable install and the long description.

A wheel contains models and scripts as lrpe_md.models and lrpe_md.scripts, except for the benchmarks and the developers'
programs. In an editable install, ``lrpe_md`` finds both folders in the checkout.
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
        # No program reads scripts/results at run time, so a wheel only needs the Python files.
        files = [path.relative_to(root) for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
        files = [path for path in files if path.parts[1] not in CHECKOUT_ONLY]
        build_data["force_include"].update({str(path): str("lrpe_md" / path) for path in files})


def link_package(root: Path) -> None:
    """Create the folder that an editable install adds to the import path. It only contains a link to lrpe_md.

    With the root on the path, models, scripts and tests could be imported too. Type checkers follow the link, but not
    an import hook.
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
    """Remove pictures and links to files from a README, because only a checkout contains them. Keep the links' text."""
    return PATHS.sub(r"\1", PICTURES.sub("", text))


def get_build_hook() -> type[BuildHookInterface]:
    return Hook


def get_metadata_hook() -> type[MetadataHookInterface]:
    return ReadmeHook
