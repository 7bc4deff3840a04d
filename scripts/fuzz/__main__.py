"""``python -m scripts.fuzz``. The import is absolute: under this name no relative one reaches the backbones."""

from lrpe_md.scripts.cli import run_program  # pyright: ignore[reportMissingImports]

if __name__ == "__main__":
    run_program("fuzz")
