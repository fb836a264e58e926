"""Traces: what is written is read again, in the contract's words."""

import io
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ls_edge.errors import DataError, UsageError
from ls_edge.records import RequestRecord, TraceWriter, TrackSpan, Visit, encode_record, read_trace, write_trace

floats = st.floats(allow_nan=False, allow_infinity=False)
names = st.sampled_from(["orin-0", "laptop", "ä"])
block_at = st.tuples(st.integers(0, 30), names)
visits = st.builds(
    Visit, holder=names, blocks=st.lists(st.integers(0, 30)).map(tuple), queue_ms=floats, engine_ms=floats
)
records = st.builds(
    RequestRecord,
    id=st.integers(0, 2**31), image=st.text(), label=st.none() | st.integers(0, 999),
    prediction=st.none() | st.integers(0, 999), latency_ms=floats, degraded=st.booleans(), error=st.none() | st.text(),
    order=st.none() | st.lists(block_at).map(tuple), skipped=st.lists(st.integers(0, 30)).map(tuple),
    attempts=st.integers(1, 9), logits=st.none() | st.lists(floats).map(tuple),
    waves=st.none(), submitted_ms=floats, visits=st.lists(visits, max_size=3).map(tuple),
)  # fmt: skip


@given(st.lists(records, max_size=5))
def test_round_trip(tmp_path_factory, written):
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    with path.open("w", encoding="utf-8") as stream:
        write_trace(stream, written)
    assert list(read_trace(path)) == written


RECORD = RequestRecord(
    id=0, image="class/0001.jpg", label=3, prediction=3, latency_ms=9.1, degraded=False, error=None,
    order=((0, "orin-0"), (4, "orin-1")), skipped=(), attempts=1, logits=(0.5, 1.0),
)  # fmt: skip


def test_a_line_is_what_the_contract_says():
    stream = io.StringIO()
    write_trace(stream, [RECORD])
    line = json.loads(stream.getvalue())
    head = "id image label prediction latency_ms degraded error order skipped attempts logits"
    assert list(line)[:11] == head.split()
    assert line["order"] == [[0, "orin-0"], [4, "orin-1"]]
    assert stream.getvalue().count("\n") == 1


def test_the_arrangement_for_a_replay():
    assert RECORD.arrangement.to_json() == [0, 4]
    waves = [[[[0, "a"], [4, "a"]], [[2, "b"]]], [[[1, "a"]]]]
    line = {**msgspec.to_builtins(RECORD), "order": None, "waves": waves}
    record = msgspec.convert(line, RequestRecord)
    assert record.arrangement.to_json() == [[[0, 4], [2]], [[1]]]
    stream = io.StringIO()
    write_trace(stream, [record])
    assert json.loads(stream.getvalue())["waves"] == waves


@pytest.mark.parametrize("broken", ['{"id": 1', "[]", '{"id": "x"}', ""])
def test_a_line_that_is_none_is_named(tmp_path, broken):
    path = tmp_path / "t.jsonl"
    with path.open("w") as stream:
        write_trace(stream, [RECORD])
        stream.write(broken + "\n")
    lines = read_trace(path)
    assert next(lines) == RECORD
    with pytest.raises(DataError, match=r"t\.jsonl:2 is no line of a trace"):
        next(lines)


def test_a_trace_is_in_its_file_line_by_line_and_corrected_in_place(tmp_path):
    path = tmp_path / "t.jsonl"
    other = msgspec.structs.replace(RECORD, id=RECORD.id + 1)
    with TraceWriter(path) as writer:
        writer.write(other)
        assert list(read_trace(path)) == [other]
        writer.write(RECORD)
        assert list(read_trace(path)) == [other, RECORD]
        late = msgspec.structs.replace(RECORD, duplicates=2)
        writer.correct([late, other])
    assert list(read_trace(path)) == [other, late]
    assert writer.problem == ""
    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_that_cannot_be_written(tmp_path):
    with pytest.raises(UsageError, match=r"cannot write the trace .*: Is a directory"):
        TraceWriter(tmp_path)
    with TraceWriter("/dev/full") as writer:
        writer.write(RECORD)
        assert "ends after 0 requests: No space left on device" in writer.problem
        said = writer.problem
        writer.write(RECORD)
        writer.correct([RECORD])
        assert writer.problem == said


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize("bad", [NAN, INFINITY, -INFINITY])
@pytest.mark.parametrize("where", ["logits", "latency_ms", "visits", "tracks"])
def test_what_the_reader_would_not_take_is_not_written(tmp_path, where, bad):
    track = TrackSpan(0, "a", (1,), begin_ms=0.0, end_ms=bad, expected_ms=1.0)
    value = {
        "logits": (0.5, bad), "latency_ms": bad, "visits": (Visit("a", (0,), engine_ms=bad),),
        "tracks": (Visit("a", (0,), tracks=(track,)),),
    }[where]  # fmt: skip
    record = msgspec.structs.replace(RECORD, id=7, **{"visits" if where == "tracks" else where: value})
    with pytest.raises(DataError, match="request 7 cannot stand in a trace"):
        encode_record(record)
    path = tmp_path / "t.jsonl"
    with TraceWriter(path) as writer:
        writer.write(RECORD)
        writer.write(record)
        writer.write(RECORD)
    assert "ends after 1 requests: request 7" in writer.problem
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
