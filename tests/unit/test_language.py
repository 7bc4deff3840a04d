"""Docstrings start with a verb or a noun phrase, not with a relative clause or a genitive."""

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from structure_limits import walk_statements

ROOT = Path(__file__).parents[2]
FOLDERS = ("lrpe_md", "models", "scripts", "tests")
BAD_START = re.compile(r"(Of|What|Where|Those|How|The way|Whose|Which)\b")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def list_docstrings(source: str) -> list[tuple[int, str]]:
    """Return the line and the text of each docstring."""
    nodes = [node for node in walk_statements(ast.parse(source)) if isinstance(node, DOCUMENTED)]
    return [(node.body[0].lineno, text) for node in nodes if (text := ast.get_docstring(node))]


def find_bad_starts(source: str) -> list[str]:
    """Return "line: first line" of each docstring with a bad start."""
    found = list_docstrings(source)
    return [f"{number}: {text.splitlines()[0]}" for number, text in found if BAD_START.match(text)]


def find_joined_rows(source: str) -> list[str]:
    """Return the lines of docstrings that join the rows of a table."""
    if "| ---" not in source:
        return []
    lines = [line.strip() for _, text in list_docstrings(source) for line in text.splitlines()]
    return [line for line in lines if re.search(r"\| -{3,} \|", line) and not re.fullmatch(r"[|\s-]*-[|\s-]*", line)]


def search_files(search: Callable[[str], list[str]]) -> dict[str, list[str]]:
    """Return what a function finds in the source of each file."""
    found = {path.relative_to(ROOT).as_posix(): search(path.read_text(encoding="utf-8")) for path in FILES}
    return {name: lines for name, lines in found.items() if lines}


def test_tables_have_a_row_per_line():
    assert not search_files(find_joined_rows)


def test_joined_rows_are_found():
    assert find_joined_rows('"""| a | b | | --- | --- | | 1 | 2 |"""') == ["| a | b | | --- | --- | | 1 | 2 |"]
    assert not find_joined_rows('"""\n| a | b |\n| --- | --- |\n| 1 | 2 |\n"""')


def test_docstrings_start_with_a_verb_or_noun():
    assert not search_files(find_bad_starts)


@pytest.mark.parametrize("start", ["Of", "What", "Where", "Those", "How", "The way", "Whose", "Which"])
def test_bad_starts_are_found(start):
    assert find_bad_starts(f'"""{start} it is."""') == [f"1: {start} it is."]
    assert find_bad_starts(f'class A:\n    async def f(self):\n        """{start} it is."""')
    assert not find_bad_starts(f'"""Return {start.lower()} it is."""\n\n"""{start} it is."""')
    assert not find_bad_starts(f'"""{start}ever it is."""')
