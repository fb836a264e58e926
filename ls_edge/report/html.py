"""The report of a run: one HTML file that needs nothing but itself.

No script, no font, no image, no link to anything outside; a content security policy in the file forbids the
rest and knows the one style sheet by its digest. What comes from outside (names of images and peers, texts of
errors) is escaped. Long runs are binned, so the file stays below 2 MB for 100,000 requests.

:func:`write_report` is for one run, :func:`write_comparison` for several with a chart that sets them side by side.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ls_edge.errors import UsageError
from ls_edge.evaluation.run_summary import RunSummary
from ls_edge.records import PeerEvent, RequestRecord
from ls_edge.report import accuracy, charts, timeline
from ls_edge.report import request_timelines as ways
from ls_edge.report.data import RunData
from ls_edge.report.narrative import story
from ls_edge.report.sections import (
    cards,
    comparison_table,
    failures,
    happened,
    peers_table,
    settings_table,
    tight,
    tracks_table,
)
from ls_edge.report.spans import has_tracks
from ls_edge.report.svg import Svg, markup, show_ms
from ls_edge.report.theme import CHART, PAGE, STAGES, VARIABLES, block_colour
from ls_edge.version import __version__

WIDE, NARROW = 880, 356

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
    body = [_head(data, title), *_sections(data, _Idents())]
    write_whole(path, _page(title, "".join(body)))


def write_comparison(path: str | Path, runs: Sequence[Run], *, title: str = "Runs compared", lede: str = "") -> None:
    """Write one file with a comparison of ``runs`` ahead of the report of each."""
    idents = _Idents()
    named = [(name, summary) for name, summary, _, _ in runs]
    body = [f"<header><h1>{markup(title)}</h1>"]
    if lede:
        body.append(f'<p class="lede">{markup(lede)}</p>')
    links = "".join(f'<a href="#run-{i}">{markup(name)}</a>' for i, (name, _) in enumerate(named))
    body.append(f'<nav aria-label="Runs">{links}</nav></header>')
    body.append(
        _section(
            "Accuracy of the runs",
            "The share of labelled answers that were right; the dark line is its 95 % interval.",
            _figure(lambda width: accuracy.accuracy_comparison(named, width), idents, "No run had labels."),
        )
    )
    body.append(_section("In figures", "One row for each run.", comparison_table(named)))
    for i, (name, summary, records, events) in enumerate(runs):
        data = RunData(summary, records, events)
        body.append(
            f'<div class="part" id="run-{i}"><h2>{markup(name)}</h2><p class="lede">{markup(tight(story(data)))}</p>'
        )
        body += [cards(summary), *_sections(data, idents, 3), "</div>"]
    write_whole(path, _page(title, "".join(body)))


def check_whole(path: str | Path) -> None:
    """Raise :class:`UsageError` where :func:`write_whole` could not write ``path``, before the work for it is done."""
    path = Path(path)
    if path.is_dir():
        raise UsageError(f"{path} is a folder, so it cannot be written; name a file")
    above = next((folder for folder in path.absolute().parents if folder.exists()), Path("/"))
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        why = "may not be written to" if above.is_dir() else "is no folder"
        raise UsageError(f"cannot write {path}: {above} {why}; give another path")


def write_whole(path: str | Path, text: str) -> None:
    """Write a text file so that ``path`` never holds half of it; raises :class:`UsageError`."""
    path = Path(path)
    if not path.name:
        raise UsageError(f"cannot write {str(path)!r}: that is no name of a file; give another path")
    if path.exists() and not path.is_file():  # such as /dev/stdout, which a rename would replace
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}; give another path") from None
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if path.exists() and not path.is_file():  # a device or a pipe must not be replaced by a file
            path.write_text(text, encoding="utf-8")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; give another path") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


class _Idents:
    """Ids that are used once in a document."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self) -> str:
        self._next += 1
        return f"c{self._next}"


def _page(title: str, body: str) -> str:
    style = VARIABLES + CHART + PAGE
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f"<title>{markup(title)}</title><style>{style}</style></head>\n<body><main>{body}"
        f"<footer>Written by ls-edge {markup(__version__)}. Times are measured on each process's own clock; a hop's "
        "time on the wire is what remains of the latency, in equal parts.</footer></main></body></html>\n"
    )


def _head(data: RunData, title: str) -> str:
    summary = data.summary
    parts = [summary.model, f"policy {summary.policy}" if summary.policy else ""]
    parts.append(f"bundle {summary.bundle_id[:12]}" if summary.bundle_id else "")
    eyebrow = " · ".join(part for part in parts if part)
    return (
        f'<header><p class="eyebrow">{markup(eyebrow)}</p><h1>{markup(title)}</h1>'
        f'<p class="lede">{markup(tight(story(data)))}</p></header>{cards(summary)}'
    )


def _sections(data: RunData, idents: _Idents, level: int = 2) -> Iterator[str]:
    section = functools.partial(_section, level=level)
    none = "No request was answered."
    no_times = "The records hold no times of holders."
    parallel = any(map(has_tracks, data.answers))
    yield section(
        "Latency",
        "From the submission of the preprocessed image to the answer. Bars count answers; the line is their "
        "cumulative share, from none to all.",
        _figure(lambda width: charts.latency_distribution(data, width), idents, none),
    )
    yield section(
        "Latency over the run",
        f"{charts.caption_over_time(data)} Triangles are degraded answers, crosses failed requests; "
        "shaded: a peer was lost.",
        _figure(lambda width: charts.latency_over_time(data, width), idents, "No request was made."),
    )
    yield section(
        "Where the time goes",
        "Mean milliseconds of an answer, then of each hop it took and of each visit to a holder. "
        + (
            "Where tracks ran side by side, an answer and a hop count those that were waited for; a track's time on "
            "the wire is what remains of its duration."
            if parallel
            else ""
        ),
        _figure(lambda width: charts.stage_breakdown(data, width), idents, no_times) + _stage_key(data),
    )
    windows = {width: timeline.pick_window(data, width // 6) for width in (WIDE, NARROW)}
    long = windows[WIDE].start > data.start_ms or windows[WIDE].end < data.end_ms
    overview = ""
    if long:
        overview = _figure(lambda width: timeline.utilisation(data, width, windows[width]), idents, no_times)
        overview += f'<h{level + 1} class="sub">A closer look at the framed stretch</h{level + 1}>'
    yield section(
        "Who served what when",
        "A lane for each peer, coloured by the block that ran: a gradient is the trained order, a patchwork another. "
        + ("The height is the share of time that the engine was busy." if long else ""),
        overview
        + _figure(lambda width: timeline.served(data, width, windows[width]), idents, no_times)
        + _block_key(data),
    )
    yield section(
        "The way of single requests",
        "Where a few answers spent their time, in the colours above; "
        + (
            "holders that worked side by side have a row each, the dark line follows what the answer waited for: in "
            "each wave the track that came back last. "
            if parallel
            else "holders stand below their first block. "
        )
        + ("" if ways.shared_scale(data) else "Each bar has a scale of its own."),
        _figure(lambda width: ways.request_ways(data, width), idents, no_times),
    )
    yield section(
        "Accuracy against skipped blocks",
        "What it costs to leave blocks out; the line is the 95 % interval (Wilson) of the share that was right.",
        _figure(lambda width: accuracy.accuracy_by_skips(data, width), idents, none),
    )
    yield section(
        "Which block ran in which slot",
        "Per cent of the answers. The trained order fills the diagonal, a random one the whole square."
        + (" The slot of a block counts those ahead of it on its own path and in earlier waves." if parallel else ""),
        _figure(lambda width: accuracy.slot_heatmap(data, width), idents, "No block ran."),
    )
    yield section("Peers", "What each of them had a part in.", peers_table(data.summary))
    tracks = tracks_table(data)
    if tracks:
        yield section(
            "Tracks",
            "Of each peer, its own waves included: tracks that were summed, their median duration as planned and as it "
            "was, those that were not summed, and why it was given none.",
            tracks,
        )
    if data.changes:
        yield section("What happened to the peers", "Each change of its state after it was first seen.", happened(data))
    if data.summary.failed:
        yield section("Failed requests", "What they ended with instead of an answer.", failures(data))
    yield section("Settings", "The flags and defaults in force.", settings_table(data.summary))


def _section(title: str, why: str, content: str, *, level: int = 2) -> str:
    heading = f'<h{level} class="sec">{markup(title)}</h{level}>'
    return f'<section>{heading}<p class="why">{markup(why)}</p>{content}</section>'


def _figure(draw: Callable[[int], Svg | None], idents: _Idents, otherwise: str) -> str:
    wide = draw(WIDE)
    narrow = draw(NARROW)
    if wide is None or narrow is None:
        return f"<p>{markup(otherwise)}</p>"
    return f"<figure>{wide.render(idents(), css='wide')}{narrow.render(idents(), css='narrow')}</figure>"


def _swatch(css: str = "", fill: str = "") -> str:
    paint = f'fill="{fill}"' if fill else f'class="{css}"'
    return f'<svg viewBox="0 0 12 12" aria-hidden="true"><rect width="12" height="12" rx="2" {paint}/></svg>'


def _stage_key(data: RunData) -> str:
    rows = data.stage_means
    if not rows:
        return ""
    means = rows[0][3]
    whole = sum(means.values()) or 1.0
    items = "".join(
        f"<li>{_swatch(stage.css)}<span><b>{stage.name}</b> {markup(show_ms(means[stage.name]))}, "
        f"{100 * means[stage.name] / whole:.0f} %: {markup(stage.meaning)}</span></li>"
        for stage in STAGES
        if means.get(stage.name, 0.0) > 0.001 * whole
    )
    return f'<ul class="key">{items}</ul>'


def _block_key(data: RunData) -> str:
    if not len(data.engines):
        return ""
    step = max(1, data.blocks // 24)
    items = "".join(
        f"<li>{_swatch(fill=block_colour(block, data.blocks))}{block}</li>" for block in range(0, data.blocks, step)
    )
    return f'<ul class="key"><li>block</li>{items}</ul>'
