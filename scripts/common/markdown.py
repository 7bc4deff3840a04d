"""Markdown tables, and documentation pages that are written by commands."""

from __future__ import annotations

from pathlib import Path

from .folder import ROOT, write

PAGES = ROOT / "docs" / "results"
PICTURES = "../../scripts/results"  # relative to a page


def table(head: list[str], lines: list[list[str]], words: int = 1) -> list[str]:
    """Return the lines of a markdown table, with an empty line at the end.

    The first ``words`` columns contain text and are left-aligned. The other columns contain numbers and are
    right-aligned.
    """
    rule = ["---"] * words + ["---:"] * (len(head) - words)
    rows = ([cell.replace("|", "\\|") for cell in cells] for cells in (head, rule, *lines))
    return ["| " + " | ".join(cells) + " |" for cells in rows] + [""]


def page(title: str, command: str, *parts: str) -> str:
    """Return a page with a title, the command that wrote it, and all parts that are not empty."""
    body = "\n\n".join(part.strip() for part in parts if part.strip())
    return f"# {title}\n\n<!-- Written by `{command}`, from scripts/results. -->\n\n{body}\n"


def write_page(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, text)
    print(path)
