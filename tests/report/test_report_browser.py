"""Reports in a browser: every chart is drawn, nothing is reported to the console, nothing is requested."""

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections import Counter

import msgspec
import numpy as np
import pytest

from ls_edge.core.bands import Bands
from ls_edge.core.bundle import Bundle
from ls_edge.engines.pipeline import Pipeline
from ls_edge.evaluation.analysis import KINDS, AnalysisOrders, AttentionStatistics, analyze
from ls_edge.evaluation.simulation_summary import SimulationContext, SiteOutcome, summarise_simulation
from ls_edge.report.html import write_analysis, write_comparison, write_report, write_simulation

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find():
    """The path of a browser, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """Chromium without a screen, a context manager; its messages are JSON that ends with a null byte (DevTools)."""

    def __init__(self, profile):
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        # The browser reads from descriptor 3 and writes to 4.
        start = (
            "import os, sys; [os.dup2(int(sys.argv[n]), n + 2) for n in (1, 2)]; os.execv(sys.argv[3], sys.argv[3:])"
        )
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", start, str(read), str(write), find(), *flags, "about:blank"],
            pass_fds=(read, write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read)
        os.close(write)
        self._last, self._buffer, self.events = 0, b"", []

    def __enter__(self):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def call(self, method, **parameters):
        """Call a method and return its result; events that come before it are kept."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if hasattr(self, "_session"):
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                return answer["result"]
            self.events.append(answer)

    def evaluate(self, expression):
        """The value of a JavaScript expression, under the policy of the page."""
        options = {"returnByValue": True, "allowUnsafeEvalBlockedByCSP": False}
        return self.call("Runtime.evaluate", expression=expression, **options)["result"].get("value")

    def wait_for(self, expression, seconds=60.0):
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.evaluate(expression):
            assert time.monotonic() < end, expression
            time.sleep(0.1)

    def _receive(self):
        while b"\0" not in self._buffer:
            assert select.select([self._read], [], [], 60.0)[0], "the browser does not answer"
            self._buffer += os.read(self._read, 1 << 20)
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


pytestmark = pytest.mark.skipif(find() is None, reason="no Chromium is installed (apt-get install chromium)")


@pytest.fixture(scope="module")
def pages(tmp_path_factory, run_with_loss, run_in_waves, tiny_bundle):
    folder = tmp_path_factory.mktemp("pages")
    for name, run in (("loss", run_with_loss), ("waves", run_in_waves)):
        write_report(folder / f"{name}.html", run.summary, run.records, run.events)
    runs = [(name, run.summary, run.records, run.events) for name, run in (("a", run_with_loss), ("b", run_in_waves))]
    write_comparison(folder / "compared.html", runs, title="Two runs")
    with Pipeline.open(Bundle.open(tiny_bundle), threads=1) as pipeline:
        rng = np.random.default_rng(0)
        batch = rng.standard_normal((8, 3, 16, 16)).astype(np.float32), rng.integers(0, 10, 8)
        found = analyze(pipeline, [batch], AnalysisOrders(Bands(6), KINDS, 4, 0))
    figures = rng.random((2, 6, 4)).tolist()
    found = msgspec.structs.replace(
        found, attention=AttentionStatistics(*figures, grid=(4, 4), prefix_tokens=0),
        settings={"of": "run", "model": "vit", "method": "<b>", "blocks": 6, "data": "digits", "bands": [[0]]},
    )  # fmt: skip
    write_analysis(folder / "analysis.html", [found])
    site = SiteOutcome(
        submitted_s=np.arange(30.0), latency_s=np.full(30, 0.5), states=np.arange(30, dtype=np.uint8) % 3,
        devices=Counter({"<b>": 2}), used=2, seconds=30.0, errors=Counter({"BudgetExceeded": 10}),
        losses=Counter({"kill": 1}), up=[(0.0, 2), (10.0, 1), (20.0, 2)],
    )  # fmt: skip
    context = SimulationContext(
        "f" * 64, 2, 1, 2, 0, "nearest", 2, 4, 1.0, {"<b>": (0, 1)}, "up=1m,down=1s", 2, 1e4, []
    )
    write_simulation(folder / "fleet.html", summarise_simulation([site], context), [site])
    return folder


CUT_TABLES = """
[...document.querySelectorAll("body *:not(.said):not(svg *)")]
  .filter((one) => one.scrollWidth > one.clientWidth + 1 && one.clientWidth)
  .filter((one) => !["visible", "clip"].includes(getComputedStyle(one).overflowX))
  .filter((one) => !(one.tabIndex === 0 && getComputedStyle(one).backgroundImage.includes("gradient")))
  .map((one) => one.outerHTML.slice(0, 200))
"""
"""What scrolls without a shadow at its edge, or not from the keyboard."""

CUT_TEXTS = """
[...document.querySelectorAll("[data-chart]")].flatMap((place) => {
  const {left, right} = place.getBoundingClientRect();
  return [...place.querySelectorAll("svg text")]
    .filter((one) => one.textContent && getComputedStyle(one).opacity !== "0" && one.getAttribute("opacity") !== "0")
    .filter((one) => !one.closest("[clip-path]"))
    .map((one) => [one.textContent, one.getBoundingClientRect()])
    .filter(([, box]) => box.left < left - 2 || box.right > right + 2)
    .map(([text, box]) => `${place.dataset.chart}: ${text} ${box.left - left} ${box.right - right}`);
})
"""
"""Texts of charts that leave their chart, which is clipped."""


@pytest.mark.parametrize(
    ("name", "width", "scheme", "least"),
    [
        ("loss", 1280, "light", 8),
        ("loss", 390, "light", 8),
        ("waves", 390, "dark", 8),
        ("analysis", 390, "light", 5),
        ("fleet", 390, "light", 2),
        ("compared", 390, "dark", 20),
    ],
)
def test_every_chart_is_drawn_without_an_error_or_a_request(pages, tmp_path, name, width, scheme, least):
    address = (pages / f"{name}.html").as_uri()
    with Browser(tmp_path / "profile") as browser:
        browser.call("Emulation.setDeviceMetricsOverride", width=width, height=9000, deviceScaleFactor=1, mobile=False)
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        browser.call("Page.navigate", url=address)
        browser.wait_for("document.readyState === 'complete'")
        browser.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
        charts = "[...document.querySelectorAll('[data-chart]')]"
        browser.wait_for(f"document.readyState === 'complete' && {charts}.every(one => one.dataset.drawn)")
        assert browser.evaluate(f"{charts}.length") >= least
        assert browser.evaluate(f"{charts}.every(one => one.querySelector('svg .mark-rect, svg .mark-rule, svg path'))")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate(CUT_TABLES) == []
        browser.wait_for(f"({CUT_TEXTS.strip()}).length === 0")  # charts follow a scroll bar that appears
        # A policy without unsafe-eval lets nobody make code of text.
        assert browser.evaluate("(() => { try { new Function('1')(); return false } catch { return true } })()") is True
        noise = [
            e
            for e in browser.events
            if e["method"] in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        ]
        assert [event["params"] for event in noise] == []
        asked = [e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
        assert set(asked) == {address}
