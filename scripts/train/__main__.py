"""Entry point of ``python -m scripts.train``.

The import is absolute because a relative import from the top-level package ``scripts`` can't reach the backbones.
"""

from lrpe_md.scripts.cli import run_program  # pyright: ignore[reportMissingImports]

if __name__ == "__main__":
    run_program("train")
