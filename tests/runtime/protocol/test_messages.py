"""Messages: what is written is read again, and whatever else comes in is one WireError."""

import contextlib
import random
import sys

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from ls_edge.core.errors import WireError
from ls_edge.core.records import TrackSpan, Visit
from ls_edge.runtime.protocol import framing
from ls_edge.runtime.protocol import messages as wire
from ls_edge.runtime.protocol.messages import (
    Accept,
    Bye,
    Cancel,
    Chunk,
    Complaint,
    FindingRow,
    Findings,
    Hello,
    Inspect,
    Install,
    Itinerary,
    Moved,
    Offer,
    Progress,
    Refuse,
    Release,
    Run,
    State,
    Stored,
    TrackRef,
    TransferId,
    Want,
    Welcome,
)

EXAMPLES = 3000
"""Mutated frames of each kind of message that are tried."""

REQUEST = bytes(range(16))
TRANSFER = TransferId(REQUEST, 2**63 + 1, 3)
DIGEST = bytes(range(32))

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True)
counts = st.integers(0, 2**16 - 1)
times = st.integers(0, 2**32 - 1)
budgets = st.integers(0, 600_000_000)
texts = st.text(max_size=20).filter(str.isprintable)
flags = st.booleans()
requests = st.binary(min_size=16, max_size=16)
numbers = st.lists(counts, max_size=5).map(tuple)
transfers = st.builds(TransferId, requests, st.integers(0, 2**64 - 1), st.integers(0, 2**16 - 2))
rows = st.builds(TrackSpan, counts, names, numbers, times, times, times, times, times, times, texts)
visits = st.lists(
    st.builds(Visit, names, numbers, times, times, times, times, st.lists(rows, max_size=2).map(tuple)), max_size=3
).map(tuple)
track_marks = st.none() | st.builds(TrackRef, st.integers(0, 2**64 - 1), counts, counts, names)


@st.composite
def itineraries(draw):
    blocks = draw(st.lists(st.integers(0, 2**16 - 1), unique=True, max_size=8))
    cut, end = sorted((draw(st.integers(0, len(blocks))), draw(st.integers(0, len(blocks)))))
    waves = []
    rest = blocks[:cut]
    while rest:
        tracks = []
        for _ in range(draw(st.integers(1, 2))):
            length = draw(st.integers(1, 3))
            if rest[:length]:
                tracks.append(tuple((block, draw(names)) for block in rest[:length]))
            rest = rest[length:]
        waves.append(tuple(tracks))
    return Itinerary(
        draw(names), draw(texts), tuple(blocks[cut:end]), draw(counts), draw(flags), tuple(waves), tuple(blocks[end:]),
        draw(visits), tuple(draw(st.lists(names, max_size=3))), 1.0, draw(counts), draw(texts), draw(track_marks),
        tuple(draw(st.lists(names, max_size=3))),
    )  # fmt: skip


hellos, welcomes = (
    st.builds(
    kind, name=names, role=texts, incarnation=st.integers(0, 2**64 - 1), minor=counts, model_id=texts,
    bundle_id=texts, blocks=numbers, engine=texts, codec=texts,
) for kind in (Hello, Welcome))  # fmt: skip
states = st.builds(
    State, warm=flags, draining=flags, stuck=flags, credits=counts, queue=counts, calls=counts, block_us=times,
    wait_us=times, reaches=st.lists(names, max_size=3).map(tuple), reach_blocks=numbers,
    far_blocks=st.lists(numbers, max_size=wire.MAX_FAR).map(tuple),
)  # fmt: skip
sizes = st.integers(1, 2**20)
runs = st.builds(Run, transfers, budgets, itineraries(), texts, sizes, sizes, texts)
digests = st.binary(min_size=32, max_size=32)
sizes_of_files = st.integers(0, wire.MAX_FILE - 1)
chunk_sizes = st.integers(1, wire.MAX_CHUNK)
finding_rows = st.builds(FindingRow, texts, texts, texts, texts)
canceled = st.lists(requests, max_size=4).map(tuple)
messages = st.one_of(
    hellos, welcomes, states, runs, st.builds(Bye, texts), st.builds(Accept, transfers, counts),
    st.builds(Release, transfers, names), st.builds(Refuse, transfers, texts, counts),
    st.builds(Progress, transfers, counts),
    st.builds(Moved, transfers, names), st.builds(Cancel, canceled, budgets),
    st.builds(Complaint, st.text(max_size=20)),
    st.builds(Offer, digests, st.integers(0, wire.MAX_MANIFEST)), st.builds(Want, digests, sizes_of_files, chunk_sizes),
    st.builds(Chunk, digests, sizes_of_files, st.binary(min_size=1, max_size=64)), st.builds(Install, digests),
    st.builds(
        Stored, texts, *[digests | st.just(b"")] * 3, counts, sizes_of_files, sizes_of_files, texts
    ),
    st.builds(Inspect), st.builds(Findings, st.lists(finding_rows, max_size=3).map(tuple)),
)  # fmt: skip

ITINERARY = Itinerary(
    "laptop", "nearest", (2, 3), 1, False, ((((0, "a"), (1, "b")),),), (), (Visit("a", (0,), 1, 2, 3),)
)
VALID = {
    "hello": Hello("a", "peer", 5, 0, "m" * 64, "b" * 64, (0, 1), "onnx CPUExecutionProvider"),
    "welcome": Welcome("b", "source", 5, 0, "m" * 64, "b" * 64),
    "state": State(True, False, False, 16, 0, 9, 400, 800, ("b", "laptop"), (2, 3)),
    "bye": Bye("draining"),
    "run": Run(TRANSFER, 10_000, ITINERARY, "raw", 16, 32),
    "accept": Accept(TRANSFER, 3),
    "refuse": Refuse(TRANSFER, "busy"),
    "progress": Progress(TRANSFER, 3),
    "release": Release(TRANSFER, "b"),
    "moved": Moved(TRANSFER, "b"),
    "cancel": Cancel((REQUEST,), 10_000),
    "complaint": Complaint("what"),
    "offer": Offer(DIGEST, 4096),
    "want": Want(DIGEST, 49_152, 1000),
    "chunk": Chunk(DIGEST, 49_152, b"bytes of a file"),
    "install": Install(DIGEST),
    "stored": Stored("ready", DIGEST, DIGEST[::-1], b"", 10, 4_000_000, 0),
    "inspect": Inspect(),
    "findings": Findings((FindingRow("warn", "clock", "two hours behind", "set it"),)),
}


def test_every_message_has_a_valid_example():
    assert {type(m) for m in VALID.values()} == set(wire.Message.__args__)


@given(messages)
def test_written_messages_are_read_again(message):
    assert framing.decode(framing.encode(message)) == [message]


def test_a_thousand_blocks_fit_into_a_header():
    waves = ((tuple((block, f"device-{block % 50:04d}") for block in range(1000)),),)
    run = msgspec.structs.replace(VALID["run"], itinerary=Itinerary("laptop", "nearest", (), 0, False, waves))
    assert framing.decode(framing.encode(run)) == [run]


def raw(tag, **fields):
    """A header with these fields, whatever they are."""
    message = msgspec.to_builtins(VALID[tag], builtin_types=(bytes,))
    return b"LS\x01" + msgspec.msgpack.encode({**message, **fields})


def itinerary(**fields):
    plain = {name: getattr(ITINERARY, name) for name in Itinerary.__struct_fields__}
    return [*{**plain, **fields}.values()]


TOO_LONG = "x" * 257
MALFORMED = {
    "nothing": (b"", "not an ls-edge message"),
    "three bytes": (b"LS\x01", "not an ls-edge message"),
    "other magic": (b"GET / HTTP/1.1", "not an ls-edge message .*GET"),
    "older major": (b"LS\x00\x80", "version 0 was received and this is version 1"),
    "newer major": (b"LS\x02" + framing.encode(VALID["bye"])[3:], "version 2 was received and this is version 1"),
    "huge header": (b"LS\x01" + b"\0" * framing.MAX_HEADER, "header of 65539 bytes, at most 65536"),
    "truncated": (framing.encode(VALID["run"])[:-1], "malformed header"),
    "trailing byte": (framing.encode(VALID["bye"]) + b"\0", "malformed header"),
    "no tag": (b"LS\x01\x80", "malformed header"),
    "unknown tag": (b"LS\x01" + msgspec.msgpack.encode({"t": "walk"}), "malformed header .*walk"),
    "tag of another type": (b"LS\x01" + msgspec.msgpack.encode({"t": 1}), "malformed header"),
    "not a map": (b"LS\x01" + msgspec.msgpack.encode([1, 2]), "malformed header"),
    "length beyond the frame": (b"LS\x01\x82\xa1t\xa5hello\xa6blocks\xdd\xff\xff\xff\xff", "malformed header"),
    "text that is not UTF-8": (b"LS\x01\x82\xa1t\xa3bye\xa6reason\xa2\xff\xfe", "malformed header"),
    "missing field": (b"LS\x01" + msgspec.msgpack.encode({"t": "accept", "credits": 1}), "malformed header .*transfer"),
    "wrong type": (raw("accept", credits="3"), "malformed header .*credits"),
    "fraction": (raw("accept", credits=1.5), "malformed header .*credits"),
    "null": (raw("progress", blocks_done=None), "malformed header"),
    "negative credits": (raw("accept", credits=-1), ">= 0 - at .*credits"),
    "negative credits in refuse": (raw("refuse", credits=-1), ">= 0 - at .*credits"),
    "negative queue": (raw("state", queue=-1), ">= 0 - at .*queue"),
    "endless block": (raw("state", block_us=2**32), "<= 4294967295 - at .*block_us"),
    "negative wait": (raw("state", wait_us=-1), ">= 0 - at .*wait_us"),
    "negative block reached": (raw("state", reach_blocks=[0, -3]), ">= 0 - at .*reach_blocks"),
    "negative block far away": (raw("state", far_blocks=[[], [0, -3]]), ">= 0 - at .*far_blocks"),
    "blocks too far away": (raw("state", far_blocks=[[]] * 7), "of length <= 6 - at .*far_blocks"),
    "negative progress": (raw("progress", blocks_done=-1), ">= 0 - at .*blocks_done"),
    "negative block in hello": (raw("hello", blocks=[-1]), ">= 0 - at .*blocks"),
    "negative incarnation": (raw("hello", incarnation=-1), ">= 0 - at .*incarnation"),
    "name empty": (raw("hello", name=""), "of allowed characters - at .*name"),
    "name too long": (raw("hello", name="n" * 64), "of allowed characters - at .*name"),
    "name with a line break": (raw("hello", name="a\nb"), "name"),
    "text too long": (raw("hello", engine=TOO_LONG), "of length <= 256 - at .*engine"),
    "long role": (raw("hello", role=TOO_LONG), "of length <= 256 - at .*role"),
    "long reason": (raw("bye", reason=TOO_LONG), "of length <= 256 - at .*reason"),
    "long refusal": (raw("refuse", reason=TOO_LONG), "of length <= 256 - at .*reason"),
    "long complaint": (raw("complaint", what="x" * 4097), "of length <= 4096 - at .*what"),
    "escape sequence": (raw("hello", model_id="\x1b[31mred"), "of allowed characters - at .*model_id"),
    "line break in a reason": (raw("bye", reason="a\nb"), "of allowed characters - at .*reason"),
    "canceled request too long": (raw("cancel", requests=[b"x" * 60_000]), "of length <= 16 - at .*requests"),
    "canceled request that is a number": (raw("cancel", requests=[7]), "malformed header"),
    "canceled for ever": (raw("cancel", budget_us=600_000_001), "<= 600000000 - at .*budget_us"),
    "cancel of very many": (raw("cancel", requests=[REQUEST] * 1025), "of length <= 1024 - at .*requests"),
    "transfer too short": (raw("accept", transfer=[REQUEST, 1]), "malformed header"),
    "transfer's request": (raw("accept", transfer=[b"x" * 17, 1, 2]), "of length <= 16 - at .*transfer"),
    "transfer's branch": (raw("accept", transfer=[REQUEST, -2, 3]), ">= 0 - at .*transfer"),
    "transfer's hop": (raw("accept", transfer=[REQUEST, 2, -3]), ">= 0 - at .*transfer"),
    "last hop there could be": (raw("run", transfer=[REQUEST, 2, 2**16 - 1]), "<= 65534 - at .*transfer"),
    "moved from nobody": (raw("moved", before=""), "of allowed characters - at .*before"),
    "no tokens": (raw("run", count=0), ">= 1 - at .*count"),
    "no width": (raw("run", dim=0), ">= 1 - at .*dim"),
    "too many tokens": (raw("run", count=2**20 + 1), "<= 1048576 - at .*count"),
    "negative budget": (raw("run", budget_us=-1), ">= 0 - at .*budget_us"),
    "endless budget": (raw("run", budget_us=600_000_001), "<= 600000000 - at .*budget_us"),
    "block remains twice": (raw("run", itinerary=itinerary(remaining=[2, 2])), "a block twice"),
    "block ran and remains": (raw("run", itinerary=itinerary(remaining=[1, 2])), "a block twice"),
    "block skipped and remains": (raw("run", itinerary=itinerary(skipped=[2])), "a block twice"),
    "negative block": (raw("run", itinerary=itinerary(remaining=[-1])), ">= 0 - at .*itinerary"),
    "empty wave": (raw("run", itinerary=itinerary(waves=[[]])), "of length >= 1 - at .*itinerary"),
    "empty track": (raw("run", itinerary=itinerary(waves=[[[]]])), "of length >= 1 - at .*itinerary"),
    "holder": (raw("run", itinerary=itinerary(waves=[[[[0, ""]]]])), "of allowed characters - at .*itinerary"),
    "relay": (raw("run", itinerary=itinerary(relays=["a/b"])), "of allowed characters - at .*itinerary"),
    "source": (raw("run", itinerary=itinerary(source="")), "of allowed characters - at .*itinerary"),
    "visit's holder": (raw("run", itinerary=itinerary(visits=[["", [0], 1, 2, 3]])), "of allowed characters - at"),
    "visit's time": (raw("run", itinerary=itinerary(visits=[["a", [0], 1, -2, 3]])), ">= 0 - at .*itinerary"),
    "track's origin": (raw("run", itinerary=itinerary(track=[1, 0, 0, "a/b"])), "of allowed characters - at"),
    "negative skips": (raw("run", itinerary=itinerary(max_skips=-1)), ">= 0 - at .*itinerary"),
    "long policy": (raw("run", itinerary=itinerary(policy=TOO_LONG)), "of length <= 256 - at .*itinerary"),
    "long codec": (raw("run", codec=TOO_LONG), "of length <= 256 - at .*codec"),
    "digest too short": (raw("offer", manifest=DIGEST[1:]), "of length >= 32 - at .*manifest"),
    "endless manifest": (raw("offer", size=wire.MAX_MANIFEST + 1), "<= 16777216 - at .*size"),
    "nothing wanted": (raw("want", size=0), ">= 1 - at .*size"),
    "too much wanted": (raw("want", size=wire.MAX_CHUNK + 1), "<= 49152 - at .*size"),
    "wanted ahead of a file": (raw("want", offset=-1), ">= 0 - at .*offset"),
    "empty chunk": (raw("chunk", data=b""), "of length >= 1 - at .*data"),
    "large chunk": (raw("chunk", data=bytes(wire.MAX_CHUNK + 1)), "of length <= 49152 - at .*data"),
    "too many findings": (raw("findings", rows=[["ok", "", "", ""]] * (wire.MAX_FINDINGS + 1)), "of length <= 64"),
    "itinerary cut off": (raw("run", itinerary=["laptop", "nearest"]), "malformed header"),
}  # fmt: skip


@pytest.mark.parametrize(("frame", "said"), MALFORMED.values(), ids=MALFORMED)
def test_malformed(frame, said):
    with pytest.raises(WireError, match=said) as caught:
        framing.decode(frame)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_deep_nesting_is_skipped_or_refused():
    """Python 3.14 compares with the size of the stack, which suffices here; earlier versions count."""
    frame = b"LS\x01\x82\xa1t\xa3bye\xa1x" + b"\x91" * 60_000 + b"\x90"
    if sys.version_info >= (3, 14):
        assert framing.decode(frame) == [wire.Bye()]
    else:
        with pytest.raises(WireError, match="malformed header"):
            framing.decode(frame)


@pytest.mark.parametrize("tag", VALID)
def test_a_newer_minor_version_may_add_fields(tag):
    assert framing.decode(raw(tag, added_later=[1, {"x": 2}])) == [VALID[tag]]


def test_a_newer_minor_version_may_lengthen_an_itinerary():
    assert framing.decode(raw("run", itinerary=[*itinerary(), "added later"])) == [VALID["run"]]


@pytest.mark.parametrize("tag", VALID)
def test_mutated_frames_are_messages_or_a_wire_error(tag, mutate):
    rng = random.Random(f"mutate {tag}")
    frame = framing.encode(VALID[tag])
    refused = 0
    for _ in range(EXAMPLES):
        broken = mutate(frame, rng)
        try:
            messages = framing.decode(memoryview(broken))
        except WireError:
            refused += 1
        else:
            assert framing.decode(framing.join(list(map(framing.encode_body, messages)))) == messages
    assert refused > EXAMPLES // 4


@given(st.binary(max_size=200), st.sampled_from([b"", b"LS", b"LS\x01", b"LS\x01\x82\xa1t"]))
@settings(max_examples=400)
def test_any_bytes_are_a_message_or_a_wire_error(data, prefix):
    with contextlib.suppress(WireError):
        framing.decode(prefix + data)


plain = st.recursive(
    st.none() | flags | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(max_size=17),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)  # fmt: skip


@given(st.data())
@settings(max_examples=400)
def test_messages_with_any_value_in_a_field_are_read_or_refused(data):
    message = VALID[data.draw(st.sampled_from(sorted(VALID)))]
    fields = msgspec.to_builtins(message, builtin_types=(bytes,))
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(plain)
    try:
        (read,) = framing.decode(b"LS\x01" + msgspec.msgpack.encode(fields))
    except WireError:
        return
    assert framing.decode(framing.encode(read)) == [read]


@given(st.lists(st.sampled_from(sorted(VALID)), min_size=1, max_size=framing.MAX_TOGETHER), st.data())
@settings(max_examples=100)
def test_several_messages_are_read_as_they_were_joined_or_refused_as_a_whole(tags, data):
    messages = [VALID[tag] for tag in tags]
    frame = framing.join([framing.encode_body(message) for message in messages])
    if len(frame) > framing.MAX_HEADER:
        return
    assert framing.decode(frame) == messages
    cut = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(WireError):
        framing.decode(frame[:cut])


def test_a_longer_array_is_refused_for_its_length():
    with pytest.raises(WireError, match="length <= 64"):
        framing.decode(b"LS\x01\xdc\0\x41" + framing.encode_body(wire.Bye()) * (framing.MAX_TOGETHER + 1))


def test_blocks_that_ran_here_join_the_track_and_clear_relays():
    it = Itinerary("s", "nearest", (0, 1, 2), 0, relays=("x",))
    it = it.ran((1,), "a").ran((0,), "b")
    assert it.waves == ((((1, "a"), (0, "b")),),)
    assert (it.remaining, it.relays, it.blocks_done) == ((2,), (), 2)
    assert it.ran((2,), "b") == Itinerary("s", "nearest", (0, 1, 2), 0).ran((1,), "a").ran((0, 2), "b")
    assert it.skip((2,)).skipped == (2,)
    assert it.skip((2,)).remaining == ()
    side_by_side = Itinerary("s", "nearest", (3,), 0, waves=((((0, "a"),), ((1, "b"),)),))
    assert side_by_side.ran((3,), "c").waves[1] == (((3, "c"),),)
    assert side_by_side.blocks_done == 2
