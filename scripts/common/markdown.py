"""Tables, and pages of the documentation that are written by a command."""

from __future__ import annotations

from pathlib import Path

from .folder import ROOT, write

PAGES = ROOT / "docs" / "results"
PICTURES = "../../scripts/results"  # as a page refers to them


def table(head: list[str], lines: list[list[str]], words: int = 1) -> list[str]:
    """Lines of markdown, an empty one behind them; the first columns are words, the others numbers."""
    rule = ["---"] * words + ["---:"] * (len(head) - words)
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *lines)] + [""]


def page(title: str, command: str, *parts: str) -> str:
    """A whole page; parts that are empty are left out."""
    body = "\n\n".join(part.strip() for part in parts if part.strip())
    return f"# {title}\n\n<!-- Written by `{command}`, from scripts/results. -->\n\n{body}\n"


def write_page(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, text)
    print(path)
