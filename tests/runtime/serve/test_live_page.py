"""Events of the live page, and the page in a browser: the answers take another way when a peer is killed."""

import base64
import json
import os
import re
import socket
import time
from pathlib import Path

import pytest

from ls_edge.runtime.fleet.local_cluster import LocalCluster
from tests.browser import Browser, needs_browser
from tests.runtime.serve.serving import Server, picture

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


def test_events_follow_the_answers(swarm, bundle, ls_edge):
    server = Server(ls_edge, swarm.path, bundle)
    status, headers, body = server.ask("GET", "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    page = body.decode()
    nonce = re.search(r"script-src 'nonce-([\w-]+)'", headers["Content-Security-Policy"])[1]
    assert f'<script nonce="{nonce}">' in page
    assert "{{nonce}}" not in page
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
    with socket.create_connection(server.address, timeout=10) as connection:
        connection.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        stream = connection.makefile("rb")
        assert stream.readline() == b"HTTP/1.1 200 OK\r\n"

        def event():
            while not (line := stream.readline()).startswith(b"data: "):
                assert line
            return json.loads(line[6:])

        assert set(event()["status"]["peers"]) == {"a", "b", "c"}
        answer = server.predict(picture())[1]
        end = time.monotonic() + 10
        while not (answers := event()["answers"]):
            assert time.monotonic() < end
        (shown,) = answers
        assert shown["label"] == answer["top"][0]["label"]
        assert [step for wave in shown["waves"] for track in wave for step in track] == answer["order"]
        assert server.stop() == 0  # an open page does not hold it up
        assert stream.read()[-5:] == b"0\r\n\r\n"
