"""The documentation site builds without warnings, loads nothing from elsewhere, and works in a browser."""

import functools
import http.server
import importlib.util
import inspect
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lrpe_md import RotateMd

ROOT = Path(__file__).parents[2]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(not importlib.util.find_spec("mkdocs"), reason="needs mkdocs: pip install -e '.[docs]'")
in_browser = pytest.mark.skipif(
    not (BROWSER and importlib.util.find_spec("playwright")), reason="needs playwright and Chromium"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stdout + done.stderr  # strict mode counts warnings, but none with --quiet
    assert "WARNING" not in done.stdout + done.stderr
    return folder


def test_nothing_is_fetched_from_elsewhere(site):
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        text = path.read_text(encoding="utf-8")
        fetched = re.findall(r"""(?:src=|<link[^>]*href=|url\()["']?(https?://[^"')]+)""", text)
        assert not [url for url in fetched if "canonical" not in url], path


def test_code_and_pictures_exist(site):
    assert (site / "repository" / "scripts" / "results" / "encoding.png").is_file()
    assert (site / "repository" / "models" / "vit.py").is_file()
    assert "lrpe_md.rotate" in (site / "reference" / "functions.html").read_text(encoding="utf-8")


def test_the_reference_shows_constructors_and_imports(site):
    modules = (site / "reference" / "modules.html").read_text(encoding="utf-8")
    plain = re.sub(r"<[^>]+>", "", modules)
    for name in ("RotateMd", "CosineMd", "PresetMd"):
        assert re.search(rf"\b{name}\(\s*(head_dim|preset)\b", plain), name
    backbones = re.sub(r"<[^>]+>", "", (site / "reference" / "backbones.html").read_text(encoding="utf-8"))
    assert "lrpe_md.models.vit" in backbones
    assert not re.search(r"(?<!lrpe_md\.)\bmodels\.vit\b(?!\.)", backbones)
    for path in (site / "reference").glob("*.html"):
        assert "<em>required" not in path.read_text(encoding="utf-8"), path.name


def test_reference_pages_say_how_to_read_them_in_a_checkout(site):
    pages = [path for path in (ROOT / "docs").rglob("*.md") if re.search(r"^:::", path.read_text("utf-8"), re.M)]
    assert len(pages) >= 6
    for path in pages:
        [name] = re.findall(r"^In a checkout, the entries .* `help\((.+)\)`\.$", path.read_text("utf-8"), re.M)
        assert (inspect.getdoc(pkgutil.resolve_name(name)) or "").count("\n") > 2
        assert "In a checkout" not in (site / "reference" / f"{path.stem}.html").read_text(encoding="utf-8")


def test_the_table_of_conventions(site):
    """RotateMd's table is a table on the site, and has one row per line in help()."""
    table = (site / "reference" / "modules.html").read_text(encoding="utf-8").split("<th>convention of</th>")[1]
    rows = table.split("</table>")[0].split("<tr>")[1:]
    assert [row.count("<td>") for row in rows] == [3] * 7
    assert re.search(r'^ *\| DINOv3, Cosmos, GLM-Image +\| "half" +\| "major_first" +\|$', RotateMd.__doc__, re.M)


def test_intervals_and_sizes_in_tables_stay_on_one_line(site):
    for name, sign in (("training-steps", "±"), ("performance", "×")):
        text = (site / "results" / f"{name}.html").read_text(encoding="utf-8")
        cells = "".join(re.findall(r"<td.*?</td>", text))
        assert re.search(rf"\d\u00a0{sign}\u00a0\d", cells)
        assert f" {sign} " not in cells


def test_asterisks_stay(site):
    text = (site / "image.html").read_text(encoding="utf-8")
    assert "train/CLASS/*.png" in text


def test_each_plot_follows_the_color_scheme(site):
    text = (site / "index.html").read_text(encoding="utf-8")
    assert "front-relative.png#only-light" in text
    assert "front-relative-dark.png#only-dark" in text


@pytest.fixture(scope="module")
def browse(site):
    """Return a function that opens a page, with a list of its errors."""
    from playwright.sync_api import sync_playwright

    def new(**options):
        page, errors = browser.new_page(base_url=f"http://127.0.0.1:{server.server_port}", **options), []
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("response", lambda answer: errors.append(answer.url) if answer.status >= 400 else None)
        return page, errors

    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, sync_playwright() as play:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = play.chromium.launch(executable_path=BROWSER, args=flags)
        yield new
        browser.close()
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@in_browser
def test_every_page_opens(browse, site):
    """Every page and its resources load without errors."""
    page, errors = browse()
    for path in sorted(site.rglob("*.html")):
        if path.name != "404.html":
            page.goto(f"/{path.relative_to(site).as_posix()}", wait_until="load")
    assert errors == []


@in_browser
def test_search_finds_adapt(browse):
    page, errors = browse()
    page.goto("/index.html")
    page.locator("input.md-search__input").click()
    page.keyboard.type("adapt")
    page.locator(".md-search-result__item a[href*='integrations.html']").first.wait_for(timeout=15_000)
    assert errors == []


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_light_dark_and_narrow(browse, scheme, width):
    page, _ = browse(color_scheme=scheme, viewport={"width": width, "height": 800})
    for name in ("index", "concepts", "results/performance"):
        page.goto(f"/{name}.html", wait_until="load")
        chosen = page.evaluate("document.body.getAttribute('data-md-color-scheme')")
        assert chosen == ("slate" if scheme == "dark" else "default")
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@in_browser
def test_code_is_not_cut(browse):
    """Code in the guides fits on a laptop screen and wraps on a phone."""
    cut = "[...document.querySelectorAll('pre > code')].filter(c => c.scrollWidth > c.clientWidth + 1).length"
    for width in (390, 1280):
        page, _ = browse(viewport={"width": width, "height": 800})
        for name in ("index", "concepts", "libraries", "recipe", "schemes", "text", "architecture", "troubleshooting"):
            page.goto(f"/{name}.html", wait_until="load")
            assert page.evaluate(cut) == 0, (name, width)


@in_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_home_shows_a_number_and_a_picture_above_the_fold(browse, width):
    page, _ = browse(viewport={"width": width, "height": 800})
    page.goto("/index.html", wait_until="load")
    for part in (".hero strong", ".hero img[src$='#only-light']"):
        box = page.locator(part).bounding_box()
        assert box["height"] > 20
        assert box["y"] + box["height"] <= 800
