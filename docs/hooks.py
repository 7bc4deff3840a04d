"""Add what the site needs beyond docs/: pages at the root, files that pages link to, and dark pictures."""

from __future__ import annotations

import functools
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)#\s]+)\.(png|svg)\)")
LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)]*)?\))")
CODE = re.compile(r"^(?:```\w*\n(.*?)^```)", re.M | re.S)
ROOM = 92  # columns of code next to the table of contents
CHECKOUT = re.compile(r"^In a checkout, the entries below show only names\..*\n\n", re.M)
ROW = re.compile(r"^\|.*", re.M)
UNBROKEN = re.compile(r"(?<=\d) ([±×]) (?=\d)")  # narrow columns don't break here
PAGES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}  # pages outside docs/
KEPT = "repository"  # folder of other files on the site


def on_files(files: Any, config: Any) -> Any:
    sources = [f"docs/{path.relative_to(config.docs_dir).as_posix()}" for path in Path(config.docs_dir).rglob("*.md")]
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
        sources.append(source)
    wanted: set[str] = set()
    for source in sources:
        for _, target, _ in LINK.findall((ROOT / source).read_text(encoding="utf-8")):
            name = resolve(source, target)
            wanted |= {each for each in (name, dark_copy(name)) if place(each).startswith(f"{KEPT}/")}
    for name in sorted(wanted):
        if (ROOT / name).is_file():
            files.append(File.generated(config, place(name), abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if any(len(line) > ROOM for code in CODE.findall(markdown) for line in code.splitlines()):
        page.meta["hide"] = ["toc"]  # wide code uses the room of the table of contents
    here = page.file.src_uri
    source = PAGES.get(here, f"docs/{here}")
    markdown = ROW.sub(lambda row: UNBROKEN.sub("\u00a0\\1\u00a0", row[0]), CHECKOUT.sub("", markdown))

    def move(link: re.Match[str]) -> str:
        name = resolve(source, link[2])
        if not (ROOT / name).is_file():
            return link[0]  # the strict build rejects it
        return f"{link[1]}{posixpath.relpath(place(name), posixpath.dirname(here) or '.')}{link[3]}"

    return LINK.sub(move, PICTURE.sub(functools.partial(add_dark, source), markdown))


def add_dark(source: str, picture: re.Match[str]) -> str:
    """Show the dark copy of a picture on dark pages, where there is one, and link each to its full size."""
    alt, name, kind = picture.groups()
    if not (ROOT / source).parent.joinpath(f"{name}-dark.{kind}").is_file():
        return f"[{picture[0]}]({name}.{kind})"
    return "".join(
        f"[![{alt}]({name}{copy}.{kind}#only-{scheme})]({name}{copy}.{kind})"
        for copy, scheme in (("", "light"), ("-dark", "dark"))
    )


def dark_copy(name: str) -> str:
    """Return the path of the copy of a picture for dark pages."""
    stem, dot, kind = name.rpartition(".")
    return f"{stem}-dark{dot}{kind}"


def resolve(source: str, target: str) -> str:
    """Return the path from the root of a file that a page links to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def place(name: str) -> str:
    """Return the path on the site of a file in the repository."""
    pages = {source: page for page, source in PAGES.items()}
    return pages.get(name) or (name.removeprefix("docs/") if name.startswith("docs/") else f"{KEPT}/{name}")
