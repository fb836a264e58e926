"""Reports as files: complete, self-contained, escaped, small."""

import base64
import hashlib
import io
import json
import re
import sys
from html.parser import HTMLParser

import msgspec
import pytest
import vl_convert
from PIL import Image

from ls_edge.core.errors import UsageError
from ls_edge.core.peer_reports import PeerState, Visit
from ls_edge.core.records import PeerContext, PeerEvent, RequestRecord, RunContext
from ls_edge.device.requirements import require
from ls_edge.evaluation.run_summary import summarize
from ls_edge.report import charts
from ls_edge.report.html import write_comparison, write_report
from ls_edge.report.runs.statistics import RunData

VOID = {"meta", "link", "br", "hr", "img", "input"}
HOSTILE = "<script>alert(1)</script>\"'&\x00\x1b[31m\u202e\udc80.png"


class Page(HTMLParser):
    """HTML parser that fails on unbalanced tags and keeps references, ids, scripts and text."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.references, self.ids, self.tags, self.text = [], [], [], set(), ""
        self.scripts, self.specs, self.policy = [], {}, ""
        self._script = None
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        values = dict(attrs)
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"]
        if tag == "script":
            self._script = values
        for name, value in attrs:
            assert not name.startswith("on"), name
            if name in ("src", "href", "xlink:href", "action", "data", "srcset"):
                self.references.append(value)
            if name == "id":
                self.ids.append(value)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self._script = None

    def handle_data(self, data):
        if self._script is None:
            self.text += "" if self.open and self.open[-1] == "style" else data
        elif self._script.get("type") == "application/json":
            self.specs[self._script["id"]] = json.loads(data)
        else:
            self.scripts.append(data)


def read(path):
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert all(reference.startswith(("#", "data:image/png;base64,")) for reference in page.references)
    assert not page.tags & {"iframe", "object", "embed", "link"}
    assert len(page.ids) == len(set(page.ids))
    directives = dict(part.strip().split(" ", 1) for part in page.policy.split(";"))
    digests = {f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'" for one in page.scripts}
    assert directives["default-src"] == "'none'"
    assert set(directives["script-src"].split()) == digests
    assert not {"connect-src", "font-src", "frame-src"} & set(directives)
    own = text
    for script in page.scripts:
        own = own.replace(script, "")
    assert "http:" not in own
    assert "https:" not in own.replace("https://vega.github.io/schema/", "")
    for spec in page.specs.values():
        assert spec["description"]
        assert "url" not in json.dumps(spec.get("data", {}))
    return own, page


@pytest.fixture(scope="module")
def long_words(run_with_loss, tmp_path_factory):
    """The report of a run with a loss: its text without the libraries, and the page."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    run = run_with_loss
    write_report(path, run.summary, run.records, run.events, title="A title")
    assert list(path.parent.iterdir()) == [path]
    return read(path)


def test_a_report_stands_alone(long_words, run_with_loss):
    own, page = long_words
    assert len(page.specs) >= 4
    assert "A title" in page.text
    assert "board-b was lost at" in page.text
    assert f"{100 * run_with_loss.summary.top1:.1f}" in page.text
    for heading in (
        "Latency over the run", "Accuracy against skipped blocks", "Peers", "What happened to the peers", "Settings",
    ):  # fmt: skip
        assert heading in page.text
    assert len(own) < 700_000


def hostile_run():
    records = [
        RequestRecord(
            id=n,
            image=HOSTILE,
            label=0,
            prediction=0 if n else None,
            latency_us=3000 + 1000 * n,
            degraded=n == 1,
            error=None if n else f"{HOSTILE}: {HOSTILE}",
            skipped=(1,) if n == 1 else (),
            attempts=1 + (n == 2),
            logits=None,
            submitted_us=1000 * n,
            waves=((((0, HOSTILE),),),) if n else (),
            visits=(Visit(HOSTILE, (0,), 1000, 1000, 100),) if n else (),
        )
        for n in range(4)
    ]
    events = [PeerEvent(1000, HOSTILE, PeerState.LOST, HOSTILE), PeerEvent(2000, HOSTILE, PeerState.STUCK, HOSTILE)]
    context = RunContext(
        bundle_id=HOSTILE,
        model=HOSTILE,
        method=HOSTILE,
        policy=HOSTILE,
        peers={HOSTILE: PeerContext((0, 1), engine=HOSTILE)},
        settings={HOSTILE: HOSTILE},
    )
    return summarize(records, events, context), records, events


def test_texts_from_outside_are_escaped(tmp_path):
    summary, records, events = hostile_run()
    write_report(tmp_path / "a.html", summary, records, events, title=HOSTILE)
    write_comparison(tmp_path / "b.html", [(HOSTILE, summary, records, events)], title=HOSTILE, lede=HOSTILE)
    for name in ("a.html", "b.html"):
        text, page = read(tmp_path / name)
        assert "<script>alert" not in text
        assert "<script>alert(1)</script>" in page.text
        assert not re.search("[\x00-\x08\x1b\u202e]", text)


def test_a_comparison_of_summaries_alone_and_runs_without_answers_have_pages(tmp_path, simulated):
    run = simulated(20, lost=None)
    failed = [
        msgspec.structs.replace(r, error="Overloaded: x", prediction=None, visits=(), waves=()) for r in run.records
    ]
    for number, records in enumerate(([], run.records[:1], failed)):
        summary = summarize(records, [], RunContext())
        write_report(tmp_path / "r.html", summary, records, [])
        own, page = read(tmp_path / "r.html")
        assert "NaN" not in own
        assert ("No request was made.", "The one image was", "None of 20 images were answered.")[number] in page.text
    assert "20 Overloaded" in page.text
    runs = [("steady", run.summary, run.records, run.events), ("other <b>", summary, (), ())]
    write_comparison(tmp_path / "c.html", runs, title="Two runs", lede="Next to each other.")
    _, page = read(tmp_path / "c.html")
    assert page.references == ["#run-0"]
    assert "other <b>" in page.text


def test_pictures_have_light_paper_where_style_sheets_are_not_read(tmp_path, run_with_loss):
    path = tmp_path / "picture.svg"
    data = RunData(run_with_loss.summary, run_with_loss.records, run_with_loss.events)
    charts.write_svg(path, charts.latency_over_time(data))
    drawn = Image.open(io.BytesIO(vl_convert.svg_to_png(path.read_text()))).convert("RGB")
    colors = {color for _, color in drawn.getcolors(1 << 24)}
    assert drawn.getpixel((3, 3)) == (0xFC, 0xFC, 0xFA)
    assert (0x1F, 0x7F, 0x60) in colors  # a peer comes back
    assert (0, 0, 0) not in colors


def test_a_chart_without_data_is_an_error(tmp_path):
    nothing = summarize([], [], RunContext())
    with pytest.raises(UsageError, match="nothing to draw"):
        charts.write_svg(tmp_path / "p.svg", charts.accuracy_comparison([("x", nothing)]))
    assert list(tmp_path.iterdir()) == []


def test_without_the_libraries_a_report_is_refused_with_what_to_install(monkeypatch):
    require("--report", "report")
    monkeypatch.setitem(sys.modules, "altair", None)  # as if it were not installed
    with pytest.raises(UsageError, match=r"--report needs altair \(extra report\); to install: "):
        require("--report", "report")
