"""Reports as self-contained HTML files.

Charts are Vega-Lite specifications (:mod:`ls_edge.report.charts`), which the file draws with its own copy of the Vega
libraries. A content security policy allows only these scripts, by their digests: no connections and no ``eval``, since
Vega's interpreter runs the expressions. Jinja2 escapes all text from outside (names of images and peers, errors). Long
runs are binned, so a file stays below 3 MB for 100,000 requests.

The templates contain the sections and their texts. Needs the extra ``report``.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ls_edge.core.errors import printable
from ls_edge.core.files import write_output
from ls_edge.core.records import PeerEvent, RequestRecord
from ls_edge.core.text import (
    NOTHING,
    counted,
    engine_name,
    format_bands,
    format_ranges,
    shorten,
    show,
    show_hours,
    show_ms,
    show_percent,
)
from ls_edge.evaluation.run_summary import RunSummary, error_type
from ls_edge.evaluation.simulation_summary import FAILED, SimulationSummary, SiteOutcome
from ls_edge.report import charts
from ls_edge.report.runs.mistakes import confusions
from ls_edge.report.runs.statistics import RunData
from ls_edge.report.theme import STYLE, Chart
from ls_edge.version import __version__

MOST_TABLE_ROWS = 60

Run = tuple[str, RunSummary, Sequence[RequestRecord], Sequence[PeerEvent]]

_Text = TypeVar("_Text", bound=str)


def write_report(
    path: str | Path,
    summary: RunSummary,
    records: Sequence[RequestRecord],
    events: Sequence[PeerEvent],
    *,
    title: str = "A run through the peers",
    classes: Sequence[str] = (),
) -> None:
    """Write the report of one run; raise :class:`UsageError` if ``path`` cannot be written."""
    data = RunData(summary, records, events, classes)
    write_output(path, render("report.html.j2", title=title, lede="", runs=[("", data)]))


def write_comparison(path: str | Path, runs: Sequence[Run], *, title: str = "Runs compared", lede: str = "") -> None:
    """Write a page that compares ``runs``, followed by the report of each that has records."""
    data = [(name, RunData(summary, records, events)) for name, summary, records, events in runs]
    summaries = [(name, summary) for name, summary, _, _ in runs]
    text = render("comparison.html.j2", title=title, lede=lede, runs=data, summaries=summaries)
    write_output(path, text)


def write_simulation(path: str | Path, summary: SimulationSummary, outcomes: Sequence[SiteOutcome]) -> None:
    """Write the report of a simulated fleet."""
    latency = np.concatenate([outcome.latency_s[outcome.states != FAILED] for outcome in outcomes]) * 1e3
    text = render("simulation.html.j2", title="A simulated fleet", summary=summary, latency=latency, outcomes=outcomes)
    write_output(path, text)


class Figure(NamedTuple):
    """Place of a chart in a page."""

    ident: str
    spec: dict[str, Any]


def _settings(summary: RunSummary) -> dict[str, Any]:
    """Return the settings of a run that have a value."""
    settings = {
        "model": summary.model,
        "training method": summary.method,
        "bundle": summary.bundle_id,
        "policy": summary.policy,
        "seed": summary.seed,
        "preprocessing, median": show_ms(summary.preprocess_ms.p50),
        **summary.settings,
        **{f"engine of {name}": engine_name(peer.engine) for name, peer in summary.peers.items()},
    }
    return {key: value for key, value in settings.items() if value not in (None, "", NOTHING)}


def render(template: str, *, scripts: Sequence[str] | None = None, **values: Any) -> str:
    """Render a template as a page, by default with the scripts that draw charts."""
    count = 0

    def figure(chart: Chart) -> Figure:
        """Place a chart."""
        nonlocal count
        count += 1
        return Figure(f"chart-{count}", charts.with_parameters(charts.spec_of(chart), narrow=False))

    scripts = [library(), _asset("report.js")] if scripts is None else scripts
    digests = " ".join(f"'sha256-{_digest(script)}'" for script in scripts) or "'none'"
    own = [Markup(text) for text in (digests, STYLE + _asset("report.css"), *scripts)]  # noqa: S704  our own files
    template_values = {"figure": figure, "digests": own[0], "style": own[1], "scripts": own[2:], "version": __version__}
    return environment().get_template(template).render(**template_values, **values)


@functools.cache
def library() -> str:
    """Return Vega, Vega-Lite, and Vega-Embed as one script, in the versions that match Altair."""
    import vl_convert

    bundle: Any = vl_convert.javascript_bundle  # its stub requires a snippet, which is optional
    text: str = bundle(vl_version=charts.VEGA_LITE)
    return text.replace("</script", "<\\/script").replace("\r", "")


@functools.cache
def environment() -> Environment:
    """Return the environment of all templates."""
    made = Environment(
        loader=PackageLoader("ls_edge.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    made.filters |= {
        "ms": show_ms,
        "number": show,
        "percent": show_percent,
        "hours": show_hours,
        "short": shorten,
        "counted": counted,
        "ranges": format_ranges,
        "error_type": error_type,
        "tight": _tight,
        "plain": _plain,
    }
    made.globals |= {
        "NOTHING": NOTHING,
        "MOST_ROWS": MOST_TABLE_ROWS,
        "charts": charts,
        "confusions": confusions,
        "settings_of": _settings,
    }
    return made


def _printable(value: Any) -> Any:
    """Make strings printable; Jinja2 escapes them afterwards."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _plain(value: Any) -> Any:
    """Return a setting as a user would write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if not isinstance(value, (list, tuple)):
        return value
    return format_bands(value) if any(isinstance(one, list) for one in value) else ", ".join(map(str, value)) or NOTHING


def _asset(name: str) -> str:
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _tight(text: _Text) -> _Text:
    """Keep a number and its unit on one line."""
    return type(text)(re.sub(r"(\d) (%|ms|s)(?![a-z])", "\\1\u00a0\\2", text))
