"""Tables, and sections of a file between their markers."""

from __future__ import annotations


def fill(text: str, begin: str, end: str, section: str) -> str:
    """The text with the section between its markers."""
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
        raise ValueError(f"expected {begin} and then {end}, once each")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{section}{end}{rest.split(end)[1]}"


def table(head: list[str], lines: list[list[str]], words: int = 1) -> list[str]:
    """Lines of markdown, an empty one behind them; the first columns are words, the others numbers."""
    rule = ["---"] * words + ["---:"] * (len(head) - words)
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *lines)] + [""]
