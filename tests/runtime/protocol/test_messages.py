"""Whatever comes in is a message or one WireError."""

import contextlib
import random
import sys

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from ls_edge.core.errors import WireError
from ls_edge.runtime.protocol import framing
from ls_edge.runtime.protocol import messages as wire
from ls_edge.runtime.protocol.messages import Itinerary
from tests.runtime.protocol.generate import EXAMPLES

MUTATIONS = 3000
"""Mutated frames of each kind of message that are tried."""


def test_a_thousand_blocks_fit_into_a_header():
    waves = ((tuple((block, f"device-{block % 50:04d}") for block in range(1000)),),)
    run = msgspec.structs.replace(EXAMPLES["run"], itinerary=Itinerary("laptop", "nearest", (), 0, waves))
    assert framing.decode(framing.encode(run)) == [run]


def test_a_longer_header_is_refused_for_its_length():
    with pytest.raises(WireError, match="header of 65539 bytes, at most 65536"):
        framing.decode(b"LS\x01" + b"\0" * framing.MAX_HEADER)


def test_deep_nesting_is_skipped_or_refused():
    """Python 3.14 compares with the size of the stack, which suffices here; earlier versions count."""
    frame = b"LS\x01\x82\xa1t\xa3bye\xa1x" + b"\x91" * 60_000 + b"\x90"
    if sys.version_info >= (3, 14):
        assert framing.decode(frame) == [wire.Bye()]
    else:
        with pytest.raises(WireError, match="malformed header"):
            framing.decode(frame)


@pytest.mark.parametrize("tag", EXAMPLES)
def test_mutated_frames_are_messages_or_a_wire_error(tag, mutate):
    rng = random.Random(f"mutate {tag}")
    frame = framing.encode(EXAMPLES[tag])
    refused = 0
    for _ in range(MUTATIONS):
        broken = mutate(frame, rng)
        try:
            messages = framing.decode(memoryview(broken))
        except WireError:
            refused += 1
        else:
            assert framing.decode(framing.join(list(map(framing.encode_body, messages)))) == messages
    assert refused > MUTATIONS // 4


@given(st.binary(max_size=200), st.sampled_from([b"", b"LS", b"LS\x01", b"LS\x01\x82\xa1t"]))
@settings(max_examples=400)
def test_any_bytes_are_a_message_or_a_wire_error(data, prefix):
    with contextlib.suppress(WireError):
        framing.decode(prefix + data)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5)
    | st.binary(max_size=17),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)  # fmt: skip


@given(st.data())
@settings(max_examples=400)
def test_messages_with_any_value_in_a_field_are_read_or_refused(data):
    message = EXAMPLES[data.draw(st.sampled_from(sorted(EXAMPLES)))]
    fields = msgspec.to_builtins(message, builtin_types=(bytes,))
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(plain)
    try:
        (read,) = framing.decode(b"LS\x01" + msgspec.msgpack.encode(fields))
    except WireError:
        return
    assert framing.decode(framing.encode(read)) == [read]


@given(st.lists(st.sampled_from(sorted(EXAMPLES)), min_size=1, max_size=framing.MAX_TOGETHER), st.data())
@settings(max_examples=100)
def test_several_messages_are_refused_as_a_whole(tags, data):
    frame = framing.join([framing.encode_body(EXAMPLES[tag]) for tag in tags])
    cut = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(WireError):
        framing.decode(frame[:cut])


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
