"""Build hooks: models and scripts in the wheel, an editable install with types, and a long description without paths.

A wheel contains models and scripts as lrpe_md.models and lrpe_md.scripts, without benchmarks and developer tools. An
editable install contains neither, because ``lrpe_md`` finds them in the checkout.
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
        # Only Python files, because no program reads scripts/results when it runs.
        files = [path.relative_to(root) for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
        files = [path for path in files if path.parts[1] not in CHECKOUT_ONLY]
        build_data["force_include"].update({str(path): str("lrpe_md" / path) for path in files})


def link_package(root: Path) -> None:
    """Create a folder that contains only a link to lrpe_md, for the import path of an editable install.

    With the repository's root on the path instead, models, scripts and tests would be importable as well. Unlike an
    import hook, type checkers follow this link.
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
    """Remove pictures from a README, and replace links to files with their text, because both need a checkout."""
    return PATHS.sub(r"\1", PICTURES.sub("", text))


def get_build_hook() -> type[BuildHookInterface]:
    return Hook


def get_metadata_hook() -> type[MetadataHookInterface]:
    return ReadmeHook
