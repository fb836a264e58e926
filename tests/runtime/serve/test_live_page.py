"""Events of the live page, and the page in a browser: the answers take another way when a peer is killed."""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ls_edge.runtime.fleet.local_cluster import LocalCluster
from ls_edge.runtime.serve.live_page import LivePage
from ls_edge.runtime.serve.replies import Refusal
from tests.browser import Browser, needs_browser
from tests.runtime.serve.serving import TOKENS, Server, picture

pytestmark = needs_browser
PLACEMENT = {"attic": [0, 1, 2, 3], "cellar": [0, 1, 2, 3]}
DROP = """{
const bytes = Uint8Array.from(atob("%s"), one => one.charCodeAt(0)), data = new DataTransfer();
data.items.add(new File([bytes], "cat.png", {type: "image/png"}));
const options = {dataTransfer: data, cancelable: true, bubbles: true};
for (const kind of ["dragover", "drop"]) document.getElementById("%s").dispatchEvent(new DragEvent(kind, options));
}"""
ANSWERS = "[...document.querySelectorAll('#answers li')].map(one => one.textContent)"
AWAY = "[...document.querySelectorAll('#swarm .away')].length"
CUT = """
[...document.querySelectorAll("#swarm text")].map(one => [one.textContent, one.getBoundingClientRect()])
  .filter(([, box]) => box.left < 0 || box.right > innerWidth).map(([text]) => text)
"""
"""Texts of the drawing that leave the window."""
BOXES = """
[...document.querySelectorAll("#swarm, #swarm text")].map(one => [one.textContent, one.getBoundingClientRect()])
  .map(([text, box]) => [text, box.left, box.top, box.right, box.bottom])
"""
"""The drawing and its texts, and where they are."""
TILES = """
Object.fromEntries([...document.querySelectorAll("#tiles div")].map(one => [...one.children])
  .map(([name, value]) => [name.textContent, value.textContent]))
"""
ROWS = """
Object.fromEntries([...document.querySelectorAll("#peers tr")].slice(1)
  .map(row => [...row.children].map(one => one.textContent)).map(([name, ...rest]) => [name, rest]))
"""
MINUTE = {
    "seconds": 60, "answers": 299, "degraded": 3, "failed": 1, "p50_ms": 14.2, "p95_ms": 47.1,
    "series": [
        {"ago_s": ago, "answers": 5, "degraded": int(ago == 30), "failed": int(ago == 31), "p50_ms": 14.0 + ago % 7,
         "p95_ms": 47.1 if ago == 20 else 20.0 + ago % 11}
        for ago in range(60)
    ],
}  # fmt: skip
STATE = "document.getElementById('state').textContent"
SAID = "document.getElementById('said').textContent"
CLASSES = "[...document.querySelectorAll('#classes li span:first-child')].map(one => one.textContent)"


def dropped(image, where="drop"):
    """A script that drops an image on an element."""
    return DROP % (base64.b64encode(image).decode(), where)


@pytest.fixture(scope="module")
def browser_of_module(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture
def browser(browser_of_module):
    with browser_of_module.new_profile() as one:
        yield one


@pytest.fixture
def server(ls_edge, swarm, bundle):
    return Server(ls_edge, swarm.path, bundle)


def opened(browser, address):
    """Show the page and wait until it has the state."""
    browser.show("http://{}:{}/".format(*address), 1280, 900)
    browser.wait_for(f"{STATE}.includes('3 of 3 peers')")


@pytest.mark.release
@pytest.mark.timeout(120)
def test_answers_take_another_way_on_the_page(tmp_path, bundle, ls_edge, browser):
    with LocalCluster(tmp_path / "peers", bundle, PLACEMENT) as local:
        local.wait_warm()
        server = Server(ls_edge, local.path, bundle)
        address = "http://{}:{}/".format(*server.address)
        drop = dropped(picture())
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
            assert re.fullmatch(r"lost \d s ago", browser.evaluate(ROWS)[used][0])
            browser.evaluate(drop)
            browser.wait_for(f"({ANSWERS}).length === {before + 2}")
            (other,) = PLACEMENT.keys() - {used}
            assert f"{other} 0-3" in browser.evaluate(ANSWERS)[0]
            shares = {name: int(row[-1].removesuffix(" %")) for name, row in browser.evaluate(ROWS).items()}
            assert sum(shares.values()) == 100
            assert shares[other] >= 50
            assert browser.evaluate(TILES)["failed"] == "0 %"
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            assert browser.evaluate(CUT) == []
            if folder := os.environ.get("LS_EDGE_PICTURES"):
                browser.picture(Path(folder) / f"serve-{width}.png")
            local.start(used)
            local.wait_warm(used)
        assert browser.noise() == []
        assert {url for url in browser.requested() if not url.startswith((address, f"blob:{address}"))} <= {"data:,"}


def test_the_minute_is_counted_by_second_and_failures_are_those_of_the_server(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("ls_edge.runtime.serve.live_page.time.monotonic", lambda: now[0])
    page = LivePage(None, None)

    def end(error=None, *latencies, degraded=False):
        async def handle(_request):
            if error:
                raise error
            page.note(*(SimpleNamespace(latency_ms=one, degraded=degraded) for one in latencies))

        with contextlib.suppress(Refusal, ZeroDivisionError):
            asyncio.run(page.counting(handle)(None))

    end(None, 500.0)
    now[0] += 50
    end(None, 10.0, 20.0, 30.0)
    for error in (Refusal(503, "full", 1), Refusal(400, "no image"), ZeroDivisionError()):
        end(error)
    now[0] += 15
    end(None, 40.0, degraded=True)
    found = page.last_minute()
    assert [(one["ago_s"], one["answers"], one["failed"]) for one in found.pop("series")] == [(15, 3, 2), (0, 1, 0)]
    assert found == {"seconds": 60, "answers": 4, "degraded": 1, "failed": 2, "p50_ms": 25.0, "p95_ms": 38.5}


BROKEN_STATES = """[...document.querySelectorAll("#peers td:nth-child(2)")].flatMap((cell) => {
  const text = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT).nextNode();
  return [...text.data.matchAll(/\\S+/g)].filter((word) => {
    const range = document.createRange();
    range.setStart(text, word.index);
    range.setEnd(text, word.index + word[0].length);
    return range.getClientRects().length !== 1;
  }).map((word) => word[0]);
})"""
"""Words of the states of peers that stand on two lines."""


@pytest.mark.parametrize("width", [390, 1280])
def test_the_last_minute_is_seen_at_a_glance(server, browser, width):
    browser.show("http://{}:{}/".format(*server.address), width, 900)
    browser.wait_for(f"{STATE}.includes('3 of 3 peers')")
    browser.evaluate("leave.abort()")
    browser.evaluate("status.peers.b.state = 'lost'")
    event = {"answers": [], "state_s": {"a": 5000, "b": 12, "c": 5000}, "minute": MINUTE}
    browser.evaluate(f"take({{run, status, ...{json.dumps(event)}}})")
    assert browser.evaluate(TILES) == {
        "answers / s": "5.0", "p50": "14 ms", "p95": "47 ms", "degraded": "1.0 %", "failed": "0.33 %",
    }  # fmt: skip
    assert browser.evaluate(ROWS)["b"][0] == "lost 12 s ago"
    texts = browser.evaluate("[...document.querySelectorAll('#latency text')].map(one => one.textContent)")
    assert texts == ["0", "20", "40", "60", "-60 s", "-40 s", "-20 s", "now"]
    assert browser.evaluate(BROKEN_STATES) == []
    every = "#latency text, #tiles dd, #tiles dt, #peers td, #peers th, h1, h2, #state"
    boxes = browser.evaluate(BOXES.replace("#swarm, #swarm text", every))
    for text, left, _, right, _ in boxes:
        assert 0 <= left <= right <= width, text
    for one, other in itertools.combinations(boxes, 2):
        assert not _share(one[1:], other[1:]) > 0.02, (one, other)
    assert browser.evaluate(
        "[...document.querySelectorAll('#tiles dd')].every(one => one.scrollWidth <= one.clientWidth)"
    )
    ends = browser.evaluate(BOXES.replace("#swarm, #swarm text", ".side > :last-child"))
    if width == 1280:  # neither column ends before the other
        assert ends[0][-1] == pytest.approx(ends[1][-1], abs=1)
    if folder := os.environ.get("LS_EDGE_PICTURES"):
        browser.picture(Path(folder) / f"minute-{width}.png")


def _share(one, other):
    """Share of a rectangle that another one covers."""
    width, height = (min(one[n + 2], other[n + 2]) - max(one[n], other[n]) for n in (0, 1))
    return max(0, width) * max(0, height) / ((one[2] - one[0]) * (one[3] - one[1]))


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


def test_page_does_not_stay_green_without_news(server, browser):
    opened(browser, server.address)
    server.process.send_signal(signal.SIGSTOP)
    browser.wait_for(f"{STATE}.includes('no news for')")
    assert browser.evaluate("document.body.classList.contains('stale')")
    good = browser.evaluate("getComputedStyle(document.querySelector('.key .good')).borderTopColor")
    assert browser.evaluate("getComputedStyle(document.querySelector('#swarm .node')).stroke") != good
    server.process.send_signal(signal.SIGCONT)
    browser.wait_for(f"{STATE}.includes('3 of 3 peers')")
    assert not browser.evaluate("document.body.classList.contains('stale')")
    assert server.stop() == 0
    browser.wait_for(f"{STATE}.includes('the server cannot be reached')")
    browser.evaluate(dropped(picture()))
    browser.wait_for(f"{SAID} === 'the server cannot be reached'")


def test_token_survives_a_reload(swarm, bundle, ls_edge, browser, tokens):
    server = Server(ls_edge, swarm.path, bundle, "--token-file", tokens)
    browser.show("http://{}:{}/".format(*server.address), 1280, 900)
    browser.wait_for(f"{STATE} === 'this server needs a token'")
    enter = "document.querySelector('#token input').value = '%s'; document.querySelector('#token button').click()"
    browser.evaluate(enter % "another-token-of-sixteen")
    browser.wait_for(f"{STATE} === 'the server does not know this token'")
    browser.evaluate(enter % TOKENS[0])
    browser.wait_for(f"{STATE}.includes('3 of 3 peers')")
    browser.call("Page.reload")
    browser.wait_for(f"{STATE}.includes('3 of 3 peers')")
    assert not browser.evaluate("document.getElementById('token').classList.contains('asked')")
    browser.evaluate(dropped(picture()))
    browser.wait_for(f"{CLASSES}.length === 5")


def test_keyboard_alone_classifies_a_file(server, browser, tmp_path):
    opened(browser, server.address)
    file = tmp_path / "cat.png"
    file.write_bytes(picture())
    browser.call("Page.setInterceptFileChooserDialog", enabled=True)
    seen = []
    while "file" not in seen:
        browser.press("Tab")
        seen.append(browser.evaluate("document.activeElement.id"))
        assert len(seen) < 10
    outline = "getComputedStyle(document.querySelector('.file')).outlineStyle"
    assert browser.evaluate(outline) == "solid"  # the focus can be seen
    browser.press(" ", "Space", " ")
    node = browser.event("Page.fileChooserOpened")["backendNodeId"]
    browser.call("DOM.setFileInputFiles", files=[str(file)], backendNodeId=node)
    browser.wait_for(f"{CLASSES}.length === 5")
    browser.press("Tab")
    assert browser.evaluate("document.activeElement.id") == "camera"
    browser.press("Enter", text="\r")
    browser.wait_for(f"{SAID}.startsWith('no camera')")
