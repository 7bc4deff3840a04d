"""Entry point of ``python -m scripts.train``. A relative import could not reach the backbones, so it is absolute."""

from lrpe_md.scripts.cli import run_program  # pyright: ignore[reportMissingImports]

if __name__ == "__main__":
    run_program("train")
