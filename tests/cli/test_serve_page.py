"""The live page in a browser: an image is dropped, a peer is killed, and the answers take another way."""

import base64
import os
from pathlib import Path

import pytest

from ls_edge.runtime.fleet.local_cluster import LocalCluster
from tests.browser import Browser, needs_browser

from .serving import Server, picture

pytestmark = needs_browser
PLACEMENT = {"attic": [0, 1, 2, 3], "cellar": [0, 1, 2, 3]}
DROP = """{
const bytes = Uint8Array.from(atob("%s"), one => one.charCodeAt(0)), data = new DataTransfer();
data.items.add(new File([bytes], "cat.png", {type: "image/png"}));
for (const kind of ["dragover", "drop"])
  document.getElementById("drop").dispatchEvent(new DragEvent(kind, {dataTransfer: data, cancelable: true}));
}"""
ANSWERS = "[...document.querySelectorAll('#answers li')].map(one => one.textContent)"
AWAY = "[...document.querySelectorAll('#swarm .away')].length"
CUT = """
[...document.querySelectorAll("#swarm text")].map(one => [one.textContent, one.getBoundingClientRect()])
  .filter(([, box]) => box.left < 0 || box.right > innerWidth).map(([text]) => text)
"""
"""Texts of the drawing that leave the window."""


@pytest.mark.timeout(120)
def test_answers_take_another_way_on_the_page(tmp_path, bundle, ls_edge):
    with LocalCluster(tmp_path / "peers", bundle, PLACEMENT) as local:
        local.wait_warm()
        server = Server(ls_edge, local.path, bundle)
        address = "http://{}:{}/".format(*server.address)
        drop = DROP % base64.b64encode(picture()).decode()
        with Browser(tmp_path / "profile") as browser:
            for width, scheme in ((1280, "light"), (390, "dark")):
                browser.show(address, width, 900, scheme)
                browser.wait_for("document.getElementById('state').textContent.includes('2 of 2 peers')")
                before = len(browser.evaluate(ANSWERS))
                browser.evaluate(drop)
                browser.wait_for(f"({ANSWERS}).length === {before + 1}")
                assert browser.evaluate("document.querySelectorAll('#classes li').length") == 5
                answer = browser.evaluate(ANSWERS)[0]
                (used,) = {name for name in PLACEMENT if f"{name} 0-3" in answer}
                assert browser.evaluate("document.querySelectorAll('#swarm .path').length") > 0
                local.kill(used)
                browser.wait_for(f"{AWAY} === 1")
                browser.evaluate(drop)
                browser.wait_for(f"({ANSWERS}).length === {before + 2}")
                (other,) = PLACEMENT.keys() - {used}
                assert f"{other} 0-3" in browser.evaluate(ANSWERS)[0]
                assert browser.evaluate("document.documentElement.scrollWidth") <= width
                assert browser.evaluate(CUT) == []
                if folder := os.environ.get("LS_EDGE_PICTURES"):
                    browser.picture(Path(folder) / f"serve-{width}.png")
                local.start(used)
                local.wait_warm(used)
            assert browser.noise() == []
            assert {url for url in browser.requested() if not url.startswith((address, f"blob:{address}"))} <= {
                "data:,"
            }
