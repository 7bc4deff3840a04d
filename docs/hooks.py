"""Add what the site needs beyond docs/: pictures and files that pages link to, dark pictures, and the changelog."""

from __future__ import annotations

import functools
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)#\s]+)\.(png|svg)\)")
LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)((?:#[^)]*)?\))")
CODE = re.compile(r"^(?:```\w*\n(.*?)^```)", re.M | re.S)
ROOM = 92  # columns of code next to the table of contents
CHECKOUT = re.compile(r"^In a checkout, the entries below show only names\..*\n\n", re.M)
ROW = re.compile(r"^\|.*", re.M)
UNBROKEN = re.compile(r"(?<=\d) ([±×]) (?=\d)")  # narrow columns don't break here
KEPT = "repository"  # where such files are on the site


def on_files(files: Any, config: Any) -> Any:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "changelog.md", content=changelog))
    wanted: set[str] = set()
    for path in Path(config.docs_dir).rglob("*.md"):
        here = path.relative_to(config.docs_dir).parent.as_posix()
        for _, target, _ in LINK.findall(path.read_text(encoding="utf-8")):
            name = outside(here, target)
            wanted |= {each for each in (name, name and dark_copy(name)) if each}
    for name in sorted(wanted):
        if (ROOT / name).is_file():
            files.append(File.generated(config, f"{KEPT}/{name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if any(len(line) > ROOM for code in CODE.findall(markdown) for line in code.splitlines()):
        page.meta["hide"] = ["toc"]  # wide code uses the room of the table of contents
    here = posixpath.dirname(page.file.src_uri)
    markdown = ROW.sub(lambda row: UNBROKEN.sub("\u00a0\\1\u00a0", row[0]), CHECKOUT.sub("", markdown))

    def move(link: re.Match[str]) -> str:
        name = outside(here, link[2])
        if name is None:
            return link[0]
        if not (ROOT / name).is_file():
            return link[0]  # which the strict build refuses
        return f"{link[1]}{posixpath.relpath(posixpath.join(KEPT, name), here or '.')}{link[3]}"

    return LINK.sub(move, PICTURE.sub(functools.partial(add_dark, page.file.src_uri), markdown))


def add_dark(page: str, picture: re.Match[str]) -> str:
    """Show the dark copy of a picture on dark pages, where there is one, and link each to its full size."""
    alt, name, kind = picture.groups()
    if not (ROOT / "docs" / page).parent.joinpath(f"{name}-dark.{kind}").is_file():
        return f"[{picture[0]}]({name}.{kind})"
    return "".join(
        f"[![{alt}]({name}{copy}.{kind}#only-{scheme})]({name}{copy}.{kind})"
        for copy, scheme in (("", "light"), ("-dark", "dark"))
    )


def dark_copy(name: str) -> str:
    """Return the path of the copy of a picture for dark pages."""
    stem, dot, kind = name.rpartition(".")
    return f"{stem}-dark{dot}{kind}"


def outside(here: str, target: str) -> str | None:
    """Return the path from the root of a link that leaves docs/, or None."""
    path = posixpath.normpath(posixpath.join("docs", here, target))
    return None if path.startswith(("docs/", "..")) else path
