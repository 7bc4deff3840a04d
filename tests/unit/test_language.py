"""Docstrings start with a verb or a noun phrase, not with a relative clause or a genitive."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("lrpe_md", "models", "scripts", "tests")
BAD_START = re.compile(r"(Of|What|Where|Those|How|The way|Whose|Which)\b")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def find_bad_starts(source: str) -> list[str]:
    """Return "line: first line" of each docstring with a bad start."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED):
            docstring = ast.get_docstring(node)
            if docstring and BAD_START.match(docstring):
                found.append(f"{node.body[0].lineno}: {docstring.splitlines()[0]}")
    return found


def find_joined_rows(source: str) -> list[str]:
    """Return the lines of docstrings that join the rows of a table."""
    docstrings = [ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED)]
    lines = [line.strip() for docstring in docstrings if docstring for line in docstring.splitlines()]
    return [line for line in lines if re.search(r"\| -{3,} \|", line) and not re.fullmatch(r"[|\s-]*-[|\s-]*", line)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_tables_have_a_row_per_line(path):
    assert not find_joined_rows(path.read_text(encoding="utf-8"))


def test_joined_rows_are_found():
    assert find_joined_rows('"""| a | b | | --- | --- | | 1 | 2 |"""') == ["| a | b | | --- | --- | | 1 | 2 |"]
    assert not find_joined_rows('"""\n| a | b |\n| --- | --- |\n| 1 | 2 |\n"""')


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_docstrings_start_with_a_verb_or_noun(path):
    assert not find_bad_starts(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("start", ["Of", "What", "Where", "Those", "How", "The way", "Whose", "Which"])
def test_bad_starts_are_found(start):
    assert find_bad_starts(f'"""{start} it is."""') == [f"1: {start} it is."]
    assert find_bad_starts(f'class A:\n    async def f(self):\n        """{start} it is."""')
    assert not find_bad_starts(f'"""Return {start.lower()} it is."""\n\n"""{start} it is."""')
    assert not find_bad_starts(f'"""{start}ever it is."""')
