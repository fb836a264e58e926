"""Reports in a browser: every chart is drawn, nothing is reported to the console, nothing is requested."""

import re
from collections import Counter

import msgspec
import numpy as np
import pytest

from ls_edge.analysis import KINDS, analyze
from ls_edge.analysis.inside.attention import AttentionStatistics
from ls_edge.analysis.page import write_analysis
from ls_edge.analysis.plan import AnalysisPlan, AnalysisSettings
from ls_edge.core.bands import Bands
from ls_edge.core.bundle import Bundle
from ls_edge.engines.pipeline import Pipeline
from ls_edge.evaluation.simulation_summary import (
    SimulationContext,
    SiteOutcome,
    summarize_simulation,
)
from ls_edge.report.html import write_comparison, write_report, write_simulation
from tests.browser import Browser, needs_browser

pytestmark = needs_browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory, run_with_loss, tiny_bundle):
    folder = tmp_path_factory.mktemp("pages")
    run = run_with_loss.summary, run_with_loss.records, run_with_loss.events
    write_report(folder / "loss.html", *run)
    write_comparison(folder / "compared.html", [(name, *run) for name in "ab"], title="Two runs")
    with Pipeline.open(Bundle.open(tiny_bundle), threads=1) as pipeline:
        rng = np.random.default_rng(0)
        batch = rng.standard_normal((8, 3, 16, 16)).astype(np.float32), rng.integers(0, 10, 8)
        found = analyze(pipeline, [batch], AnalysisPlan(AnalysisSettings(what=tuple(KINDS), orders=4), Bands(6)))
    figures = rng.random((2, 6, 4)).tolist()
    found = msgspec.structs.replace(
        found, attention=AttentionStatistics(*figures, grid=(4, 4), prefix_tokens=0),
        settings={"of": "run", "model": "vit", "method": "<b>", "blocks": 6, "data": "digits", "bands": [[0]]},
    )  # fmt: skip
    write_analysis(folder / "analysis.html", [found])
    site = SiteOutcome(
        submitted_s=np.arange(30.0), latency_s=np.full(30, 0.5), states=np.arange(30, dtype=np.uint8) % 3,
        devices=Counter({"<b>": 2}), seconds=30.0, errors=Counter({"BudgetExceeded": 10}), losses=1,
        busy_s={"<b>": 10.0}, up=[(0.0, 2), (10.0, 1), (20.0, 2)],
    )  # fmt: skip
    context = SimulationContext(
        bundle_id="f" * 64, devices=2, requests=30, sites=1, replicas=2, concurrency=4, rate=1.0,
        placement={"<b>": (0, 1)}, churn="up=1m,down=1s", max_skips=2, assumptions=[],
    )  # fmt: skip
    write_simulation(folder / "fleet.html", summarize_simulation([site], context), [site])
    return folder


CUT_TABLES = """
[...document.querySelectorAll("body *:not(.said):not(svg *)")]
  .filter((one) => one.scrollWidth > one.clientWidth + 1 && one.clientWidth)
  .filter((one) => !["visible", "clip"].includes(getComputedStyle(one).overflowX))
  .filter((one) => !(one.tabIndex === 0 && getComputedStyle(one).backgroundImage.includes("gradient")))
  .map((one) => one.outerHTML.slice(0, 200))
"""
"""What scrolls without a shadow at its edge, or not from the keyboard."""

CUT_TEXTS = """[...document.querySelectorAll("[data-chart]")].flatMap((place) => {
  const {left, right} = place.getBoundingClientRect();
  return [...place.querySelectorAll("svg text")]
    .filter((one) => one.textContent && getComputedStyle(one).opacity !== "0" && one.getAttribute("opacity") !== "0")
    .filter((one) => !one.closest("[clip-path]"))
    .map((one) => [one.textContent, one.getBoundingClientRect()])
    .filter(([, box]) => box.left < left - 2 || box.right > right + 2)
    .map(([text, box]) => `${place.dataset.chart}: ${text} ${box.left - left} ${box.right - right}`);
})"""
"""Texts of charts that leave their chart, which is clipped."""


@pytest.mark.parametrize(
    ("name", "width", "scheme", "least"),
    [
        ("loss", 1280, "light", 4),
        ("analysis", 390, "light", 5),
        ("fleet", 390, "dark", 2),
        pytest.param("compared", 390, "dark", 9, marks=pytest.mark.release),
    ],
)
def test_every_chart_is_drawn_without_an_error_or_a_request(pages, tmp_path, name, width, scheme, least):
    address = (pages / f"{name}.html").as_uri()
    with Browser(tmp_path / "profile") as browser:
        browser.show(address, width, 9000, scheme)
        browser.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
        charts = "[...document.querySelectorAll('[data-chart]')]"
        browser.wait_for(f"document.readyState === 'complete' && {charts}.every(one => one.dataset.drawn)")
        assert browser.evaluate(f"{charts}.length") >= least
        assert browser.evaluate(f"{charts}.every(one => one.querySelector('svg .mark-rect, svg .mark-rule, svg path'))")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate(CUT_TABLES) == []
        browser.wait_for(f"({CUT_TEXTS}).length === 0")  # charts follow a scroll bar that appears
        # A policy without unsafe-eval lets nobody make code of text.
        assert browser.evaluate("(() => { try { new Function('1')(); return false } catch { return true } })()") is True
        assert browser.noise() == []
        assert set(browser.requested()) == {address}


LINKS = """
document.querySelectorAll("section").forEach((one, n) => {
  const figure = one.querySelector("figure");
  if (!figure) return;
  one.querySelector(".sec").id = `heading-${n}-`;
  figure.id = `figure-${n}-`;
  const links = [`heading-${n}-`, `figure-${n}-`].map((id) => `<a href="#${id}">.</a>`);
  document.querySelector("footer").insertAdjacentHTML("beforeend", links.join(""));
})
"""
"""Make a PDF name the page of every heading with a chart and of its first chart: it names what links lead to."""


@pytest.mark.parametrize("name", [pytest.param("loss", marks=pytest.mark.release), "analysis"])
def test_a_heading_is_printed_on_the_page_of_its_chart(pages, tmp_path, name):
    with Browser(tmp_path / "profile") as browser:
        browser.show((pages / f"{name}.html").as_uri(), 1280, 9000)
        charts = "[...document.querySelectorAll('[data-chart]')]"
        browser.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
        browser.wait_for(f"{charts}.every(one => one.dataset.drawn)")
        browser.evaluate(LINKS)
        for height in (9, 10, 11.7):
            printed = browser.printed(paperWidth=8.27, paperHeight=height)
            named = re.findall(rb"/(heading|figure)-(\d+)-\s*\[(\d+) 0 R", printed)
            found = {(kind, number): page for kind, number, page in named}
            numbers = {number for _, number in found}
            assert len(numbers) >= 4
            apart = [n for n in numbers if found[b"heading", n] != found[b"figure", n]]
            assert apart == [], height
        browser.call("Emulation.setEmulatedMedia", media="print")
        browser.call("Emulation.setDeviceMetricsOverride", width=718, height=900, deviceScaleFactor=1, mobile=False)
        wide = f"{charts}.filter(one => one.querySelector('svg').getBoundingClientRect().right > innerWidth)"
        assert browser.evaluate(f"{wide}.length") == 0
