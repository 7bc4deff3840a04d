"""The documentation as a site: built strictly, self-contained, and read in a real browser."""

import functools
import http.server
import importlib.util
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(not importlib.util.find_spec("mkdocs"), reason="needs mkdocs: pip install -e '.[docs]'")
in_browser = pytest.mark.skipif(
    not (BROWSER and importlib.util.find_spec("playwright")), reason="needs playwright and Chromium"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    warned = [line for line in (done.stdout + done.stderr).splitlines() if "WARNING" in line and "griffe" not in line]
    assert (done.returncode, warned) == (0, []), done.stdout + done.stderr
    return folder


def test_nothing_is_fetched_from_elsewhere(site):
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        text = path.read_text(encoding="utf-8")
        fetched = re.findall(r"""(?:src=|<link[^>]*href=|url\()["']?(https?://[^"')]+)""", text)
        assert not [url for url in fetched if "canonical" not in url], path


def test_code_and_pictures_of_the_repository_are_there(site):
    assert (site / "repository" / "scripts" / "results" / "encoding.png").is_file()
    assert (site / "repository" / "models" / "vit.py").is_file()
    assert "lrpe_md.rotate" in (site / "reference" / "functions.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(site):
    from playwright.sync_api import sync_playwright

    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, sync_playwright() as play:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = play.chromium.launch(executable_path=BROWSER, args=flags)
        page = browser.new_page(base_url=f"http://127.0.0.1:{server.server_port}")
        page.errors = []
        page.on("console", lambda message: message.type == "error" and page.errors.append(message.text))
        page.on("response", lambda answer: answer.status >= 400 and page.errors.append(answer.url))
        yield page
        browser.close()
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@in_browser
def test_every_page_opens(page, site):
    """Every page of the menu, and all that they show, without an error."""
    for path in sorted(site.rglob("*.html")):
        if path.name != "404.html":
            page.goto(f"/{path.relative_to(site).as_posix()}", wait_until="load")
    assert page.errors == []


@in_browser
def test_search_finds_adapt(page):
    page.goto("/index.html")
    page.locator("label[for=__search]").first.click()
    page.fill("input.md-search__input", "adapt")
    found = page.locator(".md-search-result__item").first
    found.wait_for(timeout=15_000)
    assert "adapt" in found.inner_text().lower()


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_light_dark_and_narrow(page, scheme, width):
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=scheme)
    page.goto("/concepts.html")
    assert page.evaluate("document.body.dataset.mdColorScheme") == ("slate" if scheme == "dark" else "default")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
