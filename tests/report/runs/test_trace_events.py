"""Chrome trace events: of real runs over real peers, of waves of tracks, and of runs with losses."""

import collections
import json

import pytest

from ls_edge.core.errors import UsageError
from ls_edge.core.peer_reports import PeerState
from ls_edge.core.peers_file import load_peers
from ls_edge.core.records import PeerEvent, RequestRecord, RunContext
from ls_edge.data.datasets import open_data
from ls_edge.evaluation.run_summary import summarize
from ls_edge.report.runs.trace_events import trace_events, write_trace_events
from ls_edge.runtime.source.run_dataset import run_dataset
from ls_edge.runtime.source.source import Source

PLACEMENT = {"a": [0, 1, 2, 3], "b": [2, 3, 4, 5]}


def ns(microseconds):
    return round(microseconds * 1000)


def slices(events):
    return [event for event in events if event["ph"] == "X"]


def assert_nested(events):
    """Within a lane, a slice ends before the next begins, or lies within it."""
    lanes = collections.defaultdict(list)
    for event in slices(events):
        lanes[event["pid"], event["tid"]].append((ns(event["ts"]), -ns(event["ts"] + event["dur"])))
    assert lanes
    for lane in lanes.values():
        open_ends = []
        for start, negative_end in sorted(lane):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or -negative_end <= open_ends[-1]
            open_ends.append(-negative_end)


def assert_complete(events, records):
    """Each answer has a stem, a head and its blocks once, at their holders; its stages last as long as recorded."""
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    of = collections.defaultdict(list)
    for event in slices(events):
        of[event["args"]["request"]].append(event)
    for record in records:
        mine = [event for event in of[record.id] if event["cat"] != "visit"]
        if record.error is None:
            assert [event["cat"] for event in mine].count("stem") == 1
            ran = sorted((e["args"]["block"], names[e["pid"]]) for e in mine if e["cat"] == "engine")
            assert ran == sorted(record.steps)
            (head,) = [event for event in mine if event["cat"] == "head"]
            inside = record.stem_us + record.head_us + sum(visit.total_us for visit in record.visits)
            end = record.submitted_us + max(record.latency_us, inside)
            assert head["ts"] + head["dur"] == pytest.approx(end, abs=0.1)
        if all(not visit.tracks for visit in record.visits):
            for stage in ("queue", "codec", "engine"):
                recorded = sum(getattr(visit, f"{stage}_us") for visit in record.visits)
                assert sum(e["dur"] for e in mine if e["cat"] == stage) == pytest.approx(recorded, abs=0.05)


@pytest.mark.parametrize("policy", ["nearest", "parallel"])
def test_events_of_a_real_run_are_complete(peers, tiny_bundle, tmp_path, policy):
    path = tmp_path / "events.json"
    with Source.open(load_peers(peers.path), tiny_bundle, policy=policy, max_inflight=4) as source:
        run = run_dataset(source, open_data("digits", "eval").take(24), concurrency=4)
    assert len(run.records) == 24
    summary = summarize(run.records, run.events, run.context)
    write_trace_events(path, summary, run.records, run.events)
    document = json.loads(path.read_bytes())
    assert document["otherData"]["bundle_id"] == summary.bundle_id
    assert document["otherData"]["policy"] == policy
    events = document["traceEvents"]
    assert_nested(events)
    assert_complete(events, run.records)
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"source", "a", "b"}
    assert all(event["ts"] >= 0 for event in events if event["ph"] != "M")
    assert [path.name for path in tmp_path.iterdir()] == ["events.json"]


def test_a_loss_and_a_return_are_events(run_with_loss):
    records = run_with_loss.records
    events = list(trace_events(records, run_with_loss.events))
    assert_nested(events)
    assert_complete(events, records)
    instants = [event["name"] for event in events if event["ph"] == "i"]
    assert instants == [event.state.value for event in run_with_loss.events]
    begun = [event for event in events if event["ph"] == "b"]
    assert [event["args"]["request"] for event in begun] == [
        r.id for r in sorted(records, key=lambda r: r.submitted_us)
    ]
    assert [event["id"] for event in events if event["ph"] == "e"] == [event["id"] for event in begun]


def test_arrows_join_a_request_over_the_processes(run_with_loss):
    events = list(trace_events(run_with_loss.records))
    answered = next(r for r in run_with_loss.records if r.error is None and len(r.visits) > 1)
    arrows = [event for event in events if event.get("cat") == "flow" and event["id"] == answered.id]
    assert sorted(event["ph"] for event in arrows) == sorted(["s", *("t" * len(answered.visits)), "f"])
    for arrow in arrows:
        assert any(
            (s["pid"], s["tid"]) == (arrow["pid"], arrow["tid"]) and s["ts"] <= arrow["ts"] <= s["ts"] + s["dur"]
            for s in slices(events) if s["args"]["request"] == answered.id
        )  # fmt: skip


def test_empty_runs_and_texts_from_outside_are_written(tmp_path):
    path = tmp_path / "e.json"
    write_trace_events(path, summarize([], [], RunContext()), [], [])
    assert [e["name"] for e in json.loads(path.read_text())["traceEvents"]] == ["process_name", "process_sort_index"]
    failed = RequestRecord(
        id=0, image="a\udcff.png", label=None, prediction=None, latency_us=5, degraded=False,
        error="EngineError: \x1b[2J", skipped=(), attempts=1, logits=None,
    )  # fmt: skip
    write_trace_events(
        path, summarize([failed], [], RunContext()), [failed], [PeerEvent(1, "x", PeerState.LOST, "\x07")]
    )
    text = path.read_text()
    assert "\x1b" not in text
    (begun,) = [event for event in json.loads(text)["traceEvents"] if event["ph"] == "b"]
    assert (begun["args"]["image"], begun["args"]["error"]) == ("a\\xff.png", "EngineError: \\x1b[2J")
    with pytest.raises(UsageError, match="cannot write"):
        write_trace_events(tmp_path / "e.json" / "x", summarize([], [], RunContext()), [], [])
