"""Traces: what is written is read again, in the contract's words."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ls_edge.core.errors import DataError, UsageError
from ls_edge.core.peer_reports import TrackSpan, Visit
from ls_edge.core.records import RequestRecord, TraceWriter, encode_record
from tests.traces import decode_record, read_trace

floats = st.floats(allow_nan=False, allow_infinity=False)
names = st.sampled_from(["orin-0", "laptop", "0.a_b"])
block_at = st.tuples(st.integers(0, 30), names)
times = st.integers(0, 2**32 - 1)
blocks = st.lists(st.integers(0, 30)).map(tuple)
tracks = st.builds(
    TrackSpan, st.integers(0, 2**16 - 1), names, blocks, times, times, times, times, why=st.sampled_from(["", "lost"])
)
visits = st.builds(Visit, names, blocks, times, times, times, times, st.lists(tracks, max_size=2).map(tuple))
waves = st.lists(st.lists(st.lists(block_at, min_size=1).map(tuple), min_size=1).map(tuple), max_size=3).map(tuple)
records = st.builds(
    RequestRecord,
    id=st.integers(0, 2**31), image=st.text(), label=st.none() | st.integers(0, 999),
    prediction=st.none() | st.integers(0, 999), latency_us=times, degraded=st.booleans(), error=st.none() | st.text(),
    skipped=st.lists(st.integers(0, 30)).map(tuple),
    attempts=st.integers(1, 9), logits=st.none() | st.lists(floats).map(tuple),
    waves=waves, submitted_us=times, stem_us=times, visits=st.lists(visits, max_size=3).map(tuple),
)  # fmt: skip


@pytest.mark.release
@given(st.lists(records, max_size=5))
def test_records_survive_a_trace(tmp_path_factory, written):
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    path.write_bytes(b"".join(encode_record(record) + b"\n" for record in written))
    # Waves of one track each are an order in the file, and one track when they are read.
    assert list(read_trace(path)) == [
        msgspec.structs.replace(r, waves=((r.steps,),)) if r.is_plain and r.steps else r for r in written
    ]


RECORD = RequestRecord(
    id=0, image="class/0001.jpg", label=3, prediction=3, latency_us=9100, degraded=False, error=None,
    waves=((((0, "orin-0"), (4, "orin-1")),),), skipped=(), attempts=1, logits=(0.5, 1.0),
)  # fmt: skip


def test_a_line_has_the_keys_of_the_contract():
    line = json.loads(encode_record(RECORD))
    head = "id image label prediction latency_ms degraded error order skipped attempts logits"
    assert list(line)[:11] == head.split()
    assert (line["latency_ms"], line["order"], line["waves"]) == (9.1, [[0, "orin-0"], [4, "orin-1"]], None)
    assert b"\n" not in encode_record(RECORD)


def test_a_record_gives_the_arrangement_for_a_replay():
    assert RECORD.arrangement.to_json() == [0, 4]
    waves = [[[[0, "a"], [4, "a"]], [[2, "b"]]], [[[1, "a"]]]]
    line = {**json.loads(encode_record(RECORD)), "order": None, "waves": waves}
    record = decode_record(json.dumps(line))
    assert record.arrangement.to_json() == [[[0, 4], [2]], [[1]]]
    written = json.loads(encode_record(record))
    assert (written["order"], written["waves"]) == (None, waves)


def test_times_of_holders_are_milliseconds_in_the_file():
    track = TrackSpan(0, "b", (1,), 10, 2500, 3000, engine_us=1500)
    record = msgspec.structs.replace(RECORD, visits=(Visit("a", (0,), 250, 2000, 40, 500, (track,)),))
    (visit,) = json.loads(encode_record(record))["visits"]
    assert (visit["holder"], visit["queue_ms"], visit["engine_ms"], visit["wait_ms"]) == ("a", 0.25, 2.0, 0.5)
    assert (visit["tracks"][0]["end_ms"], visit["tracks"][0]["engine_ms"]) == (2.5, 1.5)
    assert decode_record(encode_record(record)) == record


def test_the_rest_of_the_latency_is_shared_equally_by_the_hops():
    visits = (Visit("a", (0,), 100, 2000, 100), Visit("b", (4,), 0, 3000, 0, 800))
    record = msgspec.structs.replace(RECORD, stem_us=1000, head_us=600, visits=visits)
    assert record.hop_us == (9100 - 1600 - 2200 - 3800) / 3
    assert RECORD.hop_us == 0
    assert msgspec.structs.replace(record, latency_us=5).hop_us == 0


def test_a_trace_grows_line_by_line(tmp_path):
    path = tmp_path / "t.jsonl"
    other = msgspec.structs.replace(RECORD, id=RECORD.id + 1)
    with TraceWriter(path) as writer:
        writer.write(other)
        assert list(read_trace(path)) == [other]
        writer.write(RECORD)
        assert list(read_trace(path)) == [other, RECORD]
    assert writer.problem == ""
    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_that_cannot_be_written_keeps_the_reason(tmp_path):
    with pytest.raises(UsageError, match=r"cannot write the trace .*: Is a directory"):
        TraceWriter(tmp_path)
    with TraceWriter("/dev/full") as writer:
        writer.write(RECORD)
        assert "ends after 0 requests: No space left on device" in writer.problem
        said = writer.problem
        writer.write(RECORD)
        assert writer.problem == said


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize("bad", [NAN, INFINITY, -INFINITY])
def test_records_with_logits_that_are_not_finite_are_not_written(tmp_path, bad):
    record = msgspec.structs.replace(RECORD, id=7, logits=(0.5, bad))
    with pytest.raises(DataError, match="request 7 cannot be written to a trace"):
        encode_record(record)
    path = tmp_path / "t.jsonl"
    with TraceWriter(path) as writer:
        writer.write(RECORD)
        writer.write(record)
        writer.write(RECORD)
    assert "ends after 1 request: request 7" in writer.problem
    assert list(read_trace(path)) == [RECORD]


def test_a_name_that_is_not_utf_8_is_written_and_read(tmp_path):
    name = "class/\udcff.jpg"
    path = tmp_path / "t.jsonl"
    with TraceWriter(path) as writer:
        writer.write(msgspec.structs.replace(RECORD, image=name, error=f"RequestError: {name}"))
    assert not writer.problem
    (record,) = read_trace(path)
    assert record.image == "class/\\udcff.jpg"
    assert record.error == "RequestError: class/\\udcff.jpg"
