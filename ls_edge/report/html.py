"""The report of a run: one HTML file that needs nothing but itself.

Charts are Vega-Lite specifications (:mod:`ls_edge.report.charts`) that the file draws with the Vega libraries that it
holds. A content security policy allows these scripts by their digests and nothing else: no connection, and no code
made from text, since expressions are run by Vega's interpreter. What comes from outside (names of images and peers,
texts of errors) is escaped by Jinja2. Long runs are binned, so the file stays below 3 MB for 100,000 requests.

:func:`write_report` is for one run, :func:`write_comparison` for several with a chart that sets them side by side,
:func:`write_simulation` for a simulated fleet, :func:`write_analysis` for what the blocks of a model do.
Needs the extra ``report``.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ls_edge.core.errors import printable
from ls_edge.core.files import write_output
from ls_edge.core.records import PeerEvent, RequestRecord
from ls_edge.core.text import format_ranges
from ls_edge.evaluation.analysis import Analysis
from ls_edge.evaluation.run_summary import RunSummary, error_type
from ls_edge.evaluation.simulation_summary import FAILED, SimulationSummary, SiteOutcome
from ls_edge.report import charts
from ls_edge.report.analysis_tables import AGREEMENT, about_analysis, agreement_rows, block_table
from ls_edge.report.formatting import NOTHING, counted, shorten, show, show_ms, show_percent
from ls_edge.report.narrative import narrative
from ls_edge.report.statistics import RunData, track_table, tracks_by_peer
from ls_edge.report.theme import FONT, STAGES, STYLE, block_colour
from ls_edge.report.timeline import has_tracks
from ls_edge.version import __version__

_REPORT = "report.html.j2"
MOST_TABLE_ROWS = 60
"""Rows of tables of events and failed requests."""

SIMULATION_SETTINGS = (
    "seed", "churn", "sites", "devices_per_site", "replicas", "concurrency", "rate", "max_skips", "budget_ms",
)  # fmt: skip
"""Fields of a simulation's summary that are shown as its settings."""

Run = tuple[str, RunSummary, Sequence[RequestRecord], Sequence[PeerEvent]]
"""Name, summary, records and events of a run to compare."""


def write_report(
    path: str | Path,
    summary: RunSummary,
    records: Sequence[RequestRecord],
    events: Sequence[PeerEvent],
    *,
    title: str = "A run through the peers",
) -> None:
    """Write the report of one run to ``path`` in one step; raises :class:`UsageError` where that cannot be written."""
    data = RunData(summary, records, events)
    parts = [summary.model, f"policy {summary.policy}" if summary.policy else ""]
    parts.append(f"bundle {summary.bundle_id[:12]}" if summary.bundle_id else "")
    eyebrow = " · ".join(part for part in parts if part)
    page = _Page()
    write_output(
        path,
        page.render(
            _REPORT, title=title, eyebrow=eyebrow, lede=narrative(data), runs=[page.run("", data)], compared=False
        ),
    )


def write_comparison(path: str | Path, runs: Sequence[Run], *, title: str = "Runs compared", lede: str = "") -> None:
    """Write one file with a comparison of ``runs`` ahead of the report of each."""
    page = _Page()
    named = [(name, summary) for name, summary, _, _ in runs]
    text = page.render(
        _REPORT,
        title=title,
        eyebrow="",
        lede=lede,
        compared=True,
        comparison=page.figure(charts.accuracy_comparison(named)),
        figures=[_comparison_row(name, summary) for name, summary in named],
        runs=[page.run(name, RunData(summary, records, events)) for name, summary, records, events in runs],
    )
    write_output(path, text)


def write_simulation(path: str | Path, summary: SimulationSummary, outcomes: Sequence[SiteOutcome]) -> None:
    """Write the report of a simulated fleet."""
    page = _Page()
    latency = np.concatenate([outcome.latency_s[outcome.states != FAILED] for outcome in outcomes]) * 1e3
    eyebrow = " · ".join(["simulated", f"policy {summary.policy}", f"bundle {summary.bundle_id[:12]}"])
    text = page.render(
        "simulation.html.j2",
        title="A simulated fleet",
        eyebrow=eyebrow,
        cards=simulation_cards(summary),
        latency=page.figure(charts.latency_histogram(latency, summary.latency_ms)),
        over_time=page.figure(charts.outcomes_over_time(outcomes)),
        profiles=[
            (shorten(name, 60), f"{one.devices:,}", show_percent(one.busy)) for name, one in summary.profiles.items()
        ],
        placement=[(shorten(name, 60), format_ranges(held) or NOTHING) for name, held in summary.placement.items()],
        losses=[(kind, f"{count:,}") for kind, count in summary.losses.by_kind.items()],
        errors=[(shorten(kind, 60), f"{count:,}") for kind, count in summary.errors.items()],
        settings=[
            (name.replace("_", " "), NOTHING if value is None else shorten(value, 200))
            for name in SIMULATION_SETTINGS
            for value in (getattr(summary, name),)
        ],
        assumptions=summary.assumptions,
    )  # fmt: skip
    write_output(path, text)


def simulation_cards(summary: SimulationSummary) -> list[Card]:
    """The figures of a simulated fleet that matter most."""
    latency, losses = summary.latency_ms, summary.losses
    p50, _, unit = show_ms(latency.p50).partition(" ")
    up, _, percent = show_percent(losses.up_share).partition(" ")
    return [
        Card("Devices", f"{summary.devices:,}", "", f"{counted(summary.sites, 'site')}"),
        Card(
            "Answered", f"{summary.answered:,}", "",
            f"of {summary.requests:,}, {f'{summary.failed:,}' if summary.failed else 'none'} failed",
            "bad" if summary.failed else "good",
        ),
        Card(
            "Degraded", f"{summary.degraded:,}", "",
            f"at most {counted(summary.skips.max, 'block')} skipped" if summary.skips.max else "no block was skipped",
            "warn" if summary.degraded else "good",
        ),
        Card("Throughput", show(summary.throughput), "/ s", f"over {summary.seconds:.3g} simulated seconds"),
        Card("Median latency", p50, unit, f"p95 {show_ms(latency.p95)}, p99 {show_ms(latency.p99)}"),
        Card("Devices up", up, percent, f"{counted(losses.count, 'loss', 'losses')} on the way"),
    ]  # fmt: skip


def write_side_by_side(
    path: str | Path, rows: Sequence[Sequence[str]], pairs: Sequence[Sequence[str]], *, title: str = "Side by side"
) -> None:
    """Write a page of documents in figures and, with ``pairs``, of what was planned and measured."""
    style = Markup(f"{STYLE}:root{{--font:{FONT}}}\n{_asset('report.css')}")  # noqa: S704  our own files
    text = _environment().get_template("side_by_side.html.j2").render(
        title=title, style=style, rows=rows, pairs=pairs, version=__version__
    )  # fmt: skip
    write_output(path, text)


def write_analysis(path: str | Path, found: Analysis, *, title: str = "Blocks of a model") -> None:
    """Write a page of an analysis of a model's blocks to ``path`` in one step."""
    page = _Page()
    headings, rows = block_table(found)
    text = page.render(
        "analysis.html.j2",
        title=title,
        lede=about_analysis(found),
        headings=headings,
        rows=rows,
        importance=page.figure(charts.importance_chart(found)),
        contribution=page.figure(charts.contribution_chart(found)),
        similarity=page.figure(charts.similarity_chart(found)),
        agreement=page.figure(charts.agreement_chart(found)),
        attention=page.figure(charts.attention_chart(found)),
        agreement_head=AGREEMENT,
        agreement_rows=agreement_rows(found),
        none_text=lambda kind: f"None: {found.reasons.get(kind, 'a figure is not finite')}.",
        settings=[(key, shorten(value, 400)) for key, value in found.settings.items() if value is not None],
    )
    write_output(path, text)


class Card(NamedTuple):
    """A figure of a run, with its unit and a remark."""

    name: str
    value: str
    unit: str
    below: str
    css: str = ""


class Figure(NamedTuple):
    """A chart's place in a page."""

    ident: str
    spec: dict[str, Any]
    description: str
    """The chart in words, for those who cannot see it."""
    columns: int = 0
    """Columns of a grid of squares; 0 for other charts."""


class _Page:
    """What a page is rendered from; gives each chart an id that is used once."""

    def __init__(self) -> None:
        self._figures = 0

    def render(self, template: str, **values: Any) -> str:
        scripts = [Markup(library()), Markup(_asset("report.js"))]  # noqa: S704  our own files
        digests = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
        policy = (
            f"default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
            "form-action 'none'"
        )
        style = Markup(f"{STYLE}:root{{--font:{FONT}}}\n{_asset('report.css')}")  # noqa: S704
        return _environment().get_template(template).render(
            policy=policy, style=style, scripts=scripts, version=__version__, **values
        )  # fmt: skip

    def figure(self, chart: charts.Chart | None, columns: int = 0) -> Figure | None:
        if chart is None:
            return None
        self._figures += 1
        spec = charts.with_parameters(charts.spec_of(chart), narrow=False)
        return Figure(f"chart-{self._figures}", spec, spec.get("description", ""), columns)

    def run(self, name: str, data: RunData) -> dict[str, Any]:
        """All that the template shows of a run."""
        summary = data.summary
        parallel = any(map(has_tracks, data.answers))
        failed = [record for record in data.records if record.error is not None]
        waves = summary.settings.get("waves")
        tracks = tracks_by_peer(data.records, waves if isinstance(waves, int) else 1)
        head, rows = track_table(tracks, data.lanes)
        _, skipped = data.slots
        return {
            "name": name,
            "narrative": narrative(data),
            "cards": cards(summary),
            "latency": self.figure(charts.latency_distribution(data)),
            "over_time": self.figure(charts.latency_over_time(data)),
            "over_time_caption": f"{_over_time_caption(data)} Triangles are degraded answers, crosses failed requests; "
            "shaded: a peer was lost.",
            "stages": self.figure(charts.stage_breakdown(data)),
            "stages_caption": _stages_caption(parallel),
            "stage_key": _stage_key(data),
            "served": self.figure(charts.served(data)),
            "served_caption": _served_caption(data),
            "block_key": [
                (block, block_colour(block, data.num_blocks))
                for block in range(0, data.num_blocks, max(1, data.num_blocks // 24))
            ],
            "requests": [
                {"why": why, "about": about, "chart": self.figure(chart)}
                for why, about, chart in charts.request_timelines(data)
            ],
            "requests_caption": _requests_caption(data, parallel),
            "skips": self.figure(charts.accuracy_by_skips(data)),
            "slots": self.figure(charts.slot_heatmap(data), data.num_blocks + bool(skipped.any())),
            "slots_caption": _slots_caption(parallel),
            "peers": [_peer_row(peer, summary) for peer in summary.peers],
            "tracks": (head, [[_tight(cell) for cell in row] for row in rows]),
            "changes": [
                (f"{event.at_us / 1e6:.3f} s", shorten(event.peer, 60), event.state.value, shorten(event.why, 200))
                for event in data.changes[:MOST_TABLE_ROWS]
            ],
            "more_changes": _more(len(data.changes)),
            "failure_counts": ", ".join(f"{count:,} {shorten(kind, 60)}" for kind, count in summary.errors.items()),
            "failures": [
                (
                    record.id,
                    shorten(record.image, 60),
                    shorten(error_type(record.error or ""), 60),
                    shorten(record.error, 240),
                )
                for record in failed[:MOST_TABLE_ROWS]
            ],
            "more_failures": _more(len(failed)),
            "settings": _settings(summary),
        }


@functools.cache
def library() -> str:
    """Vega, Vega-Lite and Vega-Embed with their dependencies as one script, of the version that Altair writes for."""
    import vl_convert

    bundle: Any = vl_convert.javascript_bundle  # its stub asks for a snippet, which may be left out
    text: str = bundle(vl_version=charts.VEGA_LITE)
    return text.replace("</script", "<\\/script").replace("\r", "")


@functools.cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("ls_edge.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, finalize=_printable,
    )  # fmt: skip
    made.filters["tight"] = _tight
    return made


def _printable(value: Any) -> Any:
    """Make text from outside printable; Jinja2 escapes it after that."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _asset(name: str) -> str:
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _tight(text: str) -> str:
    """Keep a figure and its unit on one line."""
    return re.sub(r"(\d) (%|ms|s)(?![a-z])", "\\1\u00a0\\2", text)


def _over_time_caption(data: RunData) -> str:
    if len(data.answers) > charts.MOST_POINTS:
        return "The line is the median, the dashed one the 95th percentile, the band reaches from least to most."
    if len(data.answers) == 1:
        return "The dot is the one answer."
    return f"Each dot is one of {len(data.answers):,} answers."


def _stages_caption(parallel: bool) -> str:
    text = "Mean milliseconds of an answer, then of each hop it took and of each visit to a holder."
    if parallel:
        text += (
            " Where tracks ran side by side, an answer and a hop count those that were waited for; a track's time on "
            "the wire is what remains of its duration."
        )
    return text


def _served_caption(data: RunData) -> str:
    text = (
        "A lane for each peer, coloured by the block that ran: a gradient is the trained order, a patchwork another. "
        "The height is the share of time that the engine was busy. Below it every block of the framed stretch: drag "
        "the frame, or draw another one."
    )
    kept = charts.served_window(data)
    if kept.start > data.start_ms or kept.end < data.end_ms:
        text += f" The detail of this long run is kept from {kept.start / 1e3:.2f} s to {kept.end / 1e3:.2f} s."
    return text


def _requests_caption(data: RunData, parallel: bool) -> str:
    how = (
        "holders that worked side by side have a row each, the dark line follows what the answer waited for: in each "
        "wave the track that came back last."
        if parallel
        else "holders stand below their first block."
    )
    scale = "" if charts.shared_scale(data) else " Each bar has a scale of its own."
    return f"Where a few answers spent their time, in milliseconds and in the colours above; {how}{scale}"


def _slots_caption(parallel: bool) -> str:
    text = "Per cent of the answers. The trained order fills the diagonal, a random one the whole square."
    if parallel:
        text += " The slot of a block counts those ahead of it on its own path and in earlier waves."
    return text


def cards(summary: RunSummary) -> list[Card]:
    """The figures that matter most."""
    latency, hops, interval = summary.latency_ms, summary.hops, summary.top1_interval
    accuracy, _, percent = show_percent(summary.top1).partition(" ")
    p50, _, unit = show_ms(latency.p50).partition(" ")
    seconds = NOTHING if summary.duration_s is None else show_ms(1000 * summary.duration_s)
    return [
        Card(
            "Accuracy",
            accuracy,
            percent,
            f"95 % between {show_percent(interval[0])} and {show_percent(interval[1])}" if interval else "no labels",
        ),
        Card(
            "Median latency",
            p50,
            unit,
            f"p95 {show_ms(latency.p95)}, p99 {show_ms(latency.p99)}, max {show_ms(latency.max)}",
        ),
        Card("Throughput", show(summary.throughput), "/ s", f"over {seconds}"),
        Card(
            "Answered",
            f"{summary.answered:,}",
            "",
            f"of {summary.requests:,}, {f'{summary.failed:,}' if summary.failed else 'none'} failed",
            "bad" if summary.failed else "good",
        ),
        Card(
            "Degraded",
            f"{summary.degraded:,}",
            "",
            f"skipped {show(summary.skips.mean)} blocks on average, {summary.skips.max} at most"
            if summary.skips.max
            else "no block was skipped",
            "warn" if summary.degraded else "good",
        ),
        Card(
            "Order, Kendall's τ",
            f"{summary.order_tau:+.2f}" if summary.order_tau is not None else NOTHING,
            "",
            "1 is the trained order, 0 a random one" if summary.order_tau is not None else "no plain order to rank",
        ),
        Card(
            "Hops",
            show(hops.mean),
            "",
            f"{show_ms(hops.wire_ms_p50)} wire, {show_ms(hops.engine_ms_p50)} engine (medians)",
        ),
        Card(
            "Recovered",
            f"{summary.retries:,}",
            "retry" if summary.retries == 1 else "retries",
            f"{counted(summary.duplicates_dropped, 'late answer')} dropped",
        ),
    ]


def _stage_key(data: RunData) -> list[dict[str, str]]:
    rows = data.stage_means
    means = rows[0][3] if rows else {}
    whole = sum(means.values()) or 1.0
    return [
        {
            "name": stage.name,
            "text": f"{show_ms(means[stage.name])}, {100 * means[stage.name] / whole:.0f} %: {stage.meaning}",
        }
        for stage in STAGES
        if means.get(stage.name, 0.0) > 0.001 * whole
    ]


def _peer_row(name: str, summary: RunSummary) -> tuple[str, ...]:
    peer = summary.peers[name]
    lost = "" if peer.lost == 0 else ", lost once" if peer.lost == 1 else f", lost {peer.lost} times"
    blocks = format_ranges(peer.blocks) or NOTHING
    return (
        shorten(name, 60), blocks, f"{peer.requests:,}", f"{peer.blocks_run:,}", show_percent(peer.busy),
        f"{peer.state.value}{lost}",
    )  # fmt: skip


def _comparison_row(name: str, run: RunSummary) -> tuple[str, ...]:
    return (
        shorten(name, 60),
        show_percent(run.top1),
        f"{run.answered:,} of {run.requests:,}",
        f"{run.degraded:,}",
        show_ms(run.latency_ms.p50),
        show_ms(run.latency_ms.p95),
        f"{show(run.throughput)} / s",
        f"{run.order_tau:+.2f}" if run.order_tau is not None else NOTHING,
    )


def _settings(summary: RunSummary) -> list[tuple[str, str]]:
    """What the run was made with."""
    facts = {
        "model": summary.model,
        "training method": summary.method,
        "bundle": summary.bundle_id,
        "policy": summary.policy,
        "seed": summary.seed,
        "preprocessing, median": show_ms(summary.preprocess_ms.p50),
        **summary.settings,
        **{f"engine of {name}": peer.engine for name, peer in summary.peers.items()},
    }
    return [(key, shorten(value, 400)) for key, value in facts.items() if value not in (None, "")]


def _more(count: int) -> Markup:
    if count <= MOST_TABLE_ROWS:
        return Markup("")
    return Markup('<p class="why">And {} more.</p>').format(f"{count - MOST_TABLE_ROWS:,}")
