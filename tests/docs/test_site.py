"""The documents as a site: complete, drawn, usable at the widths of phones and screens, and nothing from elsewhere."""

import functools
import http.server
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import ls_edge
from tests.browser import Browser, needs_browser

pytest.importorskip("mkdocs", reason="mkdocs is not installed: run make setup")

ROOT = Path(__file__).parents[2]
LOADED = re.compile(
    r'<(?:script|img|iframe|source)[^>]*\ssrc="([^"]+)"|<link[^>]*rel="(?:stylesheet|icon|preload|preconnect)"[^>]*href="([^"]+)"'
)
WIDE = ("index.html", "develop.html", "commands.html", "protocol.html", "python.html", "security.html")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        ["make", "-s", "site", f"SITE={folder}"], cwd=ROOT, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site):
    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=site)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_links_that_lead_nowhere_fail_the_build(tmp_path):
    """Links to an anchor, a page, and a file of the repository, checked by the settings of the real site."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Page\n\n[a](#nowhere) [b](missing.md) [c](../training/no.py)\n")
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    validation = next(line for line in settings.splitlines() if line.startswith("validation:"))
    (tmp_path / "mkdocs.yml").write_text(f"site_name: x\nstrict: true\n{validation}\n")
    assert "\nstrict: true\n" in settings
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build"], cwd=tmp_path, capture_output=True, text=True, timeout=170
    )
    assert done.returncode != 0
    assert all(f"'{target}'" in done.stderr for target in ("#nowhere", "missing.md", "../training/no.py"))


def test_nothing_is_loaded_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        for found in LOADED.findall(page.read_text(encoding="utf-8")):
            path = "".join(found)
            assert "//" not in path, (page.name, path)
            assert (page.parent / path).is_file() or path.startswith("/"), (page.name, path)
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet.name


def test_the_reference_has_the_public_names(site):
    text = (site / "python.html").read_text(encoding="utf-8")
    names = set(ls_edge.__all__) - {"__version__"}
    assert {name for name in names if f'id="ls_edge.{name}"' in text} == names
    assert not re.search(r":(?:class|meth|func):", text)


def test_diagrams_are_drawn(site):
    pytest.importorskip("merman", reason="merman has no wheel for this machine")
    text = (site / "develop.html").read_text(encoding="utf-8")
    assert re.findall(r'<div class="diagram (\w+)"><svg', text) == ["light", "dark"]
    assert "sequenceDiagram" not in text


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_pages_fit_the_window(address, tmp_path, width):
    with Browser(tmp_path) as browser:
        for name in WIDE:
            browser.show(f"{address}/{name}", width, 900)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width, name
        search(browser)
        assert [url for url in browser.requested() if not url.startswith((address, "data:", "blob:"))] == []
        assert browser.noise() == []


def search(browser):
    """Type a word into the search of the page, and wait for a result."""
    browser.evaluate("document.querySelector('[data-md-component=search-query]').focus()")
    browser.evaluate("const q = document.querySelector('[data-md-component=search-query]'); q.value = 'custody'; "
                     "q.dispatchEvent(new Event('keyup', {bubbles: true}))")  # fmt: skip
    browser.wait_for("document.querySelector('.md-search-result__item') !== null")


@needs_browser
@pytest.mark.parametrize("page", ["index.html", "examples/cifar10.html"])
def test_pages_from_disk_are_searched(site, tmp_path, page):
    with Browser(tmp_path) as browser:
        browser.show(f"file://{site}/{page}", 1280, 900)
        search(browser)
        assert [url for url in browser.requested() if not url.startswith(("file:", "data:", "blob:", "about:"))] == []
