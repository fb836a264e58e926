"""A small record, and the data of charts."""

import html
import json

import msgspec

from ls_edge.core.peer_reports import Visit
from ls_edge.core.records import RequestRecord, RunContext
from ls_edge.evaluation.run_summary import summarize
from ls_edge.report import charts
from ls_edge.report.html import environment
from ls_edge.report.runs.statistics import RunData


def record(**changes):
    base = RequestRecord(
        id=0,
        image="a.png",
        label=1,
        prediction=1,
        latency_us=12_000,
        degraded=False,
        error=None,
        waves=((((0, "a"), (1, "a"), (2, "b")),),),
        skipped=(),
        attempts=1,
        logits=None,
        submitted_us=100_000,
        stem_us=1000,
        head_us=500,
        visits=(Visit("a", (0, 1), 1000, 4000, 500), Visit("b", (2,), 0, 2000, 500)),
    )
    return msgspec.structs.replace(base, **changes)


def narrative(data):
    """Return the sentences that a page opens with."""
    return html.unescape(str(environment().get_template("narrative.html.j2").module.narrative(data)))


def data_of(records, events=()):
    return RunData(summarize(records, events, RunContext()), records, events)


def rows_of(spec):
    """All rows of data that a specification holds."""
    return [row for rows in spec["datasets"].values() for row in rows]


def spec_of(chart):
    """The specification of a chart, which Altair has compared with Vega-Lite's schema."""
    return json.loads(json.dumps(charts.spec_of(chart), allow_nan=False))


def histogram(data):
    return charts.latency_histogram(data.latency, data.summary.latency_ms)


def data_of_run(run):
    return RunData(run.summary, run.records, run.events)
