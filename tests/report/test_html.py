"""Reports as files: complete, self-contained, escaped, small."""

import base64
import hashlib
import io
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import altair as alt
import msgspec
import pytest
import vl_convert
from PIL import Image

from ls_edge.core.errors import UsageError
from ls_edge.core.records import PeerContext, PeerEvent, PeerState, RequestRecord, RunContext, TrackSpan, Visit
from ls_edge.device.requirements import require
from ls_edge.evaluation.run_summary import summarize
from ls_edge.report import charts
from ls_edge.report.html import write_comparison, write_report
from ls_edge.report.runs.statistics import RunData
from ls_edge.report.theme import STAGES

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
    assert len(page.specs) >= 9
    assert "A title" in page.text
    assert "board-b was lost at" in page.text
    assert f"{100 * run_with_loss.summary.top1:.1f}" in page.text
    for heading in (
        "Latency over the run", "Where the time goes", "Who served what when", "Timelines of single requests",
        "Accuracy against skipped blocks", "Which block ran in which slot", "Peers", "What happened to the peers",
        "Settings",
    ):  # fmt: skip
        assert heading in page.text
    assert "Tracks" not in page.text
    assert len(own) < 700_000


def test_every_chart_of_a_report_is_valid(long_words):
    kinds = {"vconcat": alt.VConcatChart, "layer": alt.LayerChart}
    for spec in long_words[1].specs.values():
        kind = next(kind for key, kind in kinds.items() if key in spec)
        kind.from_dict(spec, validate=True)


def colors_of(part):
    """Yield field, names, and whether there is a legend, of every mark whose color depends on its data."""
    if isinstance(part, dict):
        color = part.get("encoding", {}).get("color", {})
        if "field" in color and color.get("scale", {}) is not None:
            yield color["field"], tuple(color["scale"]["domain"]), color.get("legend", {}) is not None
        for inner in part.values():
            yield from colors_of(inner)
    elif isinstance(part, list):
        for inner in part:
            yield from colors_of(inner)


@pytest.mark.parametrize("run", ["run_with_loss", "run_in_waves"])
def test_every_color_has_a_legend_on_its_page(tmp_path, request, run):
    run = request.getfixturevalue(run)
    write_report(tmp_path / "r.html", run.summary, run.records, run.events)
    write_comparison(tmp_path / "c.html", [("a", run.summary, run.records, run.events)])
    for name in ("r.html", "c.html"):
        found = set(colors_of(list(read(tmp_path / name)[1].specs.values())))
        assert {domain for _, domain, _ in found} >= {tuple(STAGES), tuple(range(8))}
        assert {domain for _, domain, _ in found if len(domain) > 1} <= {
            domain for _, domain, legend in found if legend
        }


def test_a_report_of_waves_stands_alone(tmp_path, run_in_waves):
    path = tmp_path / "report.html"
    run = run_in_waves
    write_report(path, run.summary, run.records, run.events)
    own, page = read(path)
    assert "a track's time on the wire is what remains of its duration" in page.text
    assert len(own) < 700_000


def hostile_tracks():
    return (
        TrackSpan(0, HOSTILE, (0,), 0, 2000, 1000, 100, 1000),
        TrackSpan(0, HOSTILE + "2", (1,), 0, 2500, 1000, 100, 1000),
        TrackSpan(0, HOSTILE + "3", (), 0, 2400, 1000, why=HOSTILE),
        TrackSpan(0, HOSTILE + "4", (), 0, 0, 1000, why="no gain"),
    )


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
            waves=((((0, HOSTILE),), ((1, HOSTILE + "2"),)),) if n == 3 else ((((0, HOSTILE),),),) if n else (),
            visits=(Visit(HOSTILE, (0,), 1000, 1000, 100, 0, hostile_tracks() if n == 3 else ()),) if n else (),
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


def test_a_comparison_holds_every_run(tmp_path, simulated):
    runs = []
    for name, options in (("steady", {"lost": None}), ("shaken", {"policy": "random"})):
        run = simulated(60, **options)
        runs.append((name, run.summary, run.records, run.events))
    write_comparison(tmp_path / "c.html", runs, title="Two runs", lede="Beside each other.")
    _, page = read(tmp_path / "c.html")
    assert {"run-0", "run-1"} <= set(page.ids)
    assert {"#run-0", "#run-1"} == set(page.references)
    assert "shaken" in page.text


@pytest.mark.parametrize("count", [0, 1, 2])
def test_small_and_empty_runs_have_reports(tmp_path, simulated, count):
    run = simulated(count, lost=None) if count else None
    records = run.records if run else []
    path = tmp_path / "r.html"
    write_report(path, summarize(records, [], RunContext()), records, [])
    write_comparison(tmp_path / "c.html", [("only", summarize(records, [], RunContext()), records, [])])
    assert "NaN" not in read(path)[0]
    read(tmp_path / "c.html")


def test_a_run_without_answers_has_a_report(tmp_path, simulated):
    records = [
        msgspec.structs.replace(r, error="Overloaded: no credit", prediction=None, visits=(), waves=())
        for r in simulated(20).records
    ]
    path = tmp_path / "r.html"
    write_report(path, summarize(records, [], RunContext()), records, [])
    _, page = read(path)
    assert "None of 20 images were answered." in page.text
    assert "20 Overloaded" in page.text


@pytest.mark.release
def test_files_of_long_runs_are_bounded(tmp_path, simulated):
    sizes = []
    for times in (1, 12):
        run = simulated(1000, seed=1)
        length = max(r.submitted_us + r.latency_us for r in run.records)
        records = [
            msgspec.structs.replace(r, id=r.id + len(run.records) * n, submitted_us=r.submitted_us + n * length)
            for n in range(times)
            for r in run.records
        ]
        events = [msgspec.structs.replace(e, at_us=e.at_us + n * length) for n in range(times) for e in run.events]
        path = tmp_path / f"{times}.html"
        write_report(path, summarize(records, events, run.context), records, events)
        sizes.append(path.stat().st_size)
    assert sizes[1] < 1.2 * sizes[0]
    assert sizes[1] < 2_000_000


def test_many_peers_blocks_and_events_stay_bounded(tmp_path, simulated):
    holdings = {f"peer-{n:02d}": (n % 24, (n + 1) % 24) for n in range(48)}
    run = simulated(300, holdings=holdings, policy="random")
    events = run.events + [
        PeerEvent(1000 * n, f"peer-{n % 48:02d}", PeerState.LOST if n // 48 % 2 else PeerState.ALIVE)
        for n in range(5000)
    ]
    path = tmp_path / "r.html"
    write_report(path, summarize(run.records, events, run.context), run.records, events)
    assert len(read(path)[0]) < 1_500_000


@pytest.mark.parametrize("draw", [charts.latency_over_time, charts.served])
def test_pictures_are_whole_svg_files(tmp_path, run_with_loss, draw):
    path = tmp_path / "picture.svg"
    charts.write_svg(path, draw(RunData(run_with_loss.summary, run_with_loss.records, run_with_loss.events)))
    root = ElementTree.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme" in path.read_text()
    assert "var(" not in path.read_text()


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
    for chart in (charts.slot_heatmap(RunData(nothing, [], [])), charts.accuracy_comparison([("x", nothing)])):
        with pytest.raises(UsageError, match="nothing to draw"):
            charts.write_svg(tmp_path / "p.svg", chart)
    assert list(tmp_path.iterdir()) == []


def test_a_comparison_is_an_svg_file(tmp_path, run_with_loss):
    charts.write_svg(tmp_path / "p.svg", charts.accuracy_comparison([("one", run_with_loss.summary)]))
    assert "one" in "".join(ElementTree.parse(tmp_path / "p.svg").getroot().itertext())


def test_a_path_that_cannot_be_written_is_one_clear_line(tmp_path, run_with_loss):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "report.html", tmp_path, ""):
        with pytest.raises(UsageError, match="cannot write"):
            write_report(path, run_with_loss.summary, [], [])
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_without_the_libraries_a_report_is_refused_with_what_to_install(monkeypatch):
    require("--report", "report")
    monkeypatch.setitem(sys.modules, "altair", None)  # as if it were not installed
    with pytest.raises(UsageError, match=r"--report needs altair \(extra report\); to install: "):
        require("--report", "report")
