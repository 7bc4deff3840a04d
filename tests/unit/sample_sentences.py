"""Print 100 random sentences that users read: README, docs, help and errors.

    python tests/unit/sample_sentences.py [SEED] [NUMBER]

Read them aloud as an editor: at most 3 of 100 may be sentences that you would not say to a colleague.
"""

import ast
import random
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def strip_markup(text: str) -> str:
    """Return prose without code blocks, tables, headings, links' targets and lists' bullets."""
    text = re.sub(r"```.*?```|<!--.*?-->|<[^>]+>", "\n\n", text, flags=re.S)
    text = re.sub(r"^(\s*::: .*|\s+options:.*|#.*|\|.*|    .*)$", "\n", text, flags=re.M)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"^\s*(?:[-*]|\d+\.) ", "\n\n", text, flags=re.M)


def split_sentences(text: str) -> list[str]:
    """Return the sentences of paragraphs with at least four words."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        whole = " ".join(paragraph.replace("*", "").split())
        found += re.split(r"(?<=[.!?:]) (?=[A-Z`(])", whole)
    return [each for each in found if len(each.split()) >= 4 and re.search(r"[.!?:]$", each)]


def show_string(node: ast.expr) -> str:
    """Return a string's text, with the expressions of an f-string in braces."""
    return ast.unparse(node).removeprefix("f")[1:-1]


def read_strings(path: Path) -> list[str]:
    """Return the help texts and error messages of a module."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "help":
            found.append(show_string(node.value))
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            found += [show_string(each) for each in node.exc.args if isinstance(each, (ast.JoinedStr, ast.Constant))]
    return [each for each in found if len(each.split()) >= 4]


def read_sentences() -> dict[str, list[str]]:
    """Return the sentences of each file."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = {page: split_sentences(strip_markup(page.read_text(encoding="utf-8"))) for page in pages}
    for folder in ("lrpe_md", "models", "scripts"):
        found |= {path: read_strings(path) for path in sorted((ROOT / folder).rglob("*.py"))}
    return {path.relative_to(ROOT).as_posix(): texts for path, texts in found.items()}


if __name__ == "__main__":
    seed, number = (int(each) for each in (sys.argv[1:] + ["0", "100"][len(sys.argv) - 1 :]))
    every = [(path, text) for path, texts in read_sentences().items() for text in texts]
    for path, text in random.Random(seed).sample(every, number):
        print(f"{path}: {text}")
    words = [len(text.split()) for _, text in every]
    print(f"{len(every)} sentences, {sum(words) / len(words):.1f} words on average")
