"""A peer written in JavaScript, asked message by message by processes that the test plays."""

import contextlib
import json
import random
import signal
import socket
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from ls_edge.core.bundle import Bundle
from ls_edge.core.parts import HEAD, STEM
from ls_edge.engines.pipeline import Pipeline
from ls_edge.runtime.clients.status import Observer
from ls_edge.runtime.protocol import codecs, framing
from ls_edge.runtime.protocol.messages import (
    Accept,
    Bye,
    Cancel,
    Complaint,
    Hello,
    Itinerary,
    Moved,
    Progress,
    Refuse,
    Release,
    Run,
    State,
    TrackRef,
    TransferId,
    Welcome,
)
from ls_edge.runtime.transport.keys import load_secret

HERE = Path(__file__).parent
VECTORS = json.loads((HERE / "vectors.json").read_text(encoding="utf-8"))
BLOCKS = 6


class Caller:
    """A process that a test plays: it dials one peer."""

    def __init__(self, context, address, hello, options=None):
        self.hello = hello
        self.socket = context.socket(zmq.DEALER)
        for option, value in (options or {}).items():
            self.socket.set(option, value)
        self.socket.linger = 0
        self.socket.connect("tcp://{}:{}".format(*address))
        self.heard = []

    def send(self, message, *payload):
        self.socket.send_multipart([message if isinstance(message, bytes) else framing.encode(message), *payload])

    def greet(self):
        self.send(self.hello)
        return self.next(Welcome)

    def next(self, *kinds, timeout=20.0):
        """The next message of these kinds, with its tokens where it is a RUN; STATE and PROGRESS are passed over."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if self.socket.poll(100):
                header, *payload = self.socket.recv_multipart()
                (message,) = framing.decode(header)  # the second implementation sends each message alone
                if isinstance(message, kinds):
                    return (
                        (message, codecs.decode(message.codec, payload[0], message.count, message.dim))
                        if payload
                        else message
                    )
                assert isinstance(message, (State, Progress)), message
        raise AssertionError(f"waited {timeout} s in vain for {kinds}")

    def until(self, kind):
        """The next message of this kind; requests that go on or come home before it are passed over."""
        while not isinstance(message := self.next(kind, Moved, Run), kind):
            pass
        return message

    def until_welcome(self):
        """Say HELLO and return what comes before its answer: all that was sent before has been worked on then."""
        self.send(self.hello)
        heard = []
        while not isinstance(message := self.next(Welcome, Complaint, Bye, Run, Accept, Refuse), Welcome):
            heard.append(message)
        return heard


@pytest.fixture
def js(mixed, tiny_bundle):
    """A peer in JavaScript with blocks 1 to 3, and processes that dial it; peer ``a`` has all blocks."""
    with world_of(mixed, tiny_bundle) as world:
        yield world


@pytest.fixture
def banded_js(mixed, banded_bundle):
    """The same with the bands 0/1-4/5."""
    with world_of(mixed, banded_bundle) as world:
        yield world


@contextlib.contextmanager
def world_of(mixed, bundle, a=range(BLOCKS)):
    context = zmq.Context()
    manifest = Bundle.open(bundle).manifest
    callers = []

    class World:
        tokens = (
            np.random.default_rng(1).standard_normal((1, manifest.tokens.count, manifest.tokens.dim)).astype(np.float32)
        )
        shape = (manifest.tokens.count, manifest.tokens.dim)

        def caller(self, name, role="source", greeted=True, **changes):
            blocks = tuple(range(BLOCKS)) if role == "peer" else ()
            fields = {"model_id": manifest.model_id, "bundle_id": manifest.bundle_id, "blocks": blocks, **changes}
            one = Caller(context, peers.address("js"), Hello(name, role, 7, 0, **fields))
            callers.append(one)
            if greeted:
                one.greet()
            return one

        def run(self, itinerary, *, hop=1, branch=5, request=b"r" * 16, budget=20.0, returning=""):
            return Run(
                TransferId(request, branch, hop), round(budget * 1e6), itinerary, "raw", *self.shape, returning
            ), bytes(self.tokens.data.cast("B"))  # fmt: skip

        def computed(self, *blocks):
            tokens = self.tokens
            with Pipeline.open(Bundle.open(bundle), threads=1) as chain:
                for block in blocks:
                    tokens = chain.block(block, tokens)
            return tokens

    with mixed({"js": [1, 2, 3], "a": a}, "js", bundle=bundle) as peers:
        peers.signal("a", signal.SIGSTOP)
        peers.wait_warm("js")
        world = World()
        world.peers = peers
        yield world
        for one in callers:
            one.socket.close(0)
        context.term()


def plain(*remaining, source="laptop", policy="nearest", **more):
    return Itinerary(source, policy, remaining or tuple(range(BLOCKS)), 0, **more)


BY_A = ((((0, "a"),),),)


def test_greeting(js):
    source = js.caller("laptop", greeted=False)
    welcome = source.greet()
    assert (welcome.name, welcome.role, welcome.blocks, welcome.codec) == ("js", "peer", (1, 2, 3), "raw")
    state = source.next(State)
    assert (state.warm, state.draining, state.credits, state.reaches) == (True, False, 8, ())
    source.send(source.hello)
    assert source.next(Welcome) == welcome
    for hello in (Hello("b", "peer", 1, 0, "another", ""), Hello("x", "peer", 1, 0, welcome.model_id, "")):
        stranger = js.caller("x", greeted=False)
        stranger.send(hello)
        complaint = stranger.next(Complaint)
        assert complaint.model_id == ("" if hello.model_id == welcome.model_id else welcome.model_id)


def test_observers_are_told_how_it_is_and_may_do_nothing(js):
    with Observer(js.peers.file) as observer:
        seen = observer.look(20.0)["js"]
    assert (seen.state, seen.warm, seen.blocks, seen.engine) == ("alive", True, (1, 2, 3), "javascript")
    caller = js.caller("watcher", role="observer", model_id="", bundle_id="")
    caller.send(*js.run(plain(source="watcher")))
    assert "observer" in caller.next(Complaint).what


def test_nothing_is_done_before_hello_and_complaints_are_few(js):
    stranger = js.caller("laptop", greeted=False)
    stranger.send(*js.run(plain()))
    assert "before hello" in stranger.next(Complaint).what
    for _ in range(100):
        stranger.send(b"LS\x01garbage")
        stranger.send(Complaint("you"))
    heard = stranger.until_welcome()
    assert 5 <= len(heard) < 100  # ten in a second, and one machine is slower than another
    assert all(isinstance(message, Complaint) for message in heard)


def test_tokens_of_a_source_come_back_with_what_ran(js):
    source = js.caller("laptop")
    run, payload = js.run(plain(1, 2, 0, 3, 4, 5))
    source.send(run, payload)
    assert source.next(Accept).transfer == run.transfer
    home, tokens = source.next(Run)
    assert home.transfer == TransferId(run.transfer.request, run.transfer.branch, 2)
    assert home.itinerary.waves == ((((1, "js"), (2, "js")),),)
    assert (home.itinerary.remaining, home.returning) == ((0, 3, 4, 5), "unreachable")
    assert [visit.holder for visit in home.itinerary.visits] == ["js"]
    np.testing.assert_allclose(tokens, js.computed(1, 2), rtol=1e-4, atol=1e-4)
    source.send(Accept(home.transfer, 1))
    assert source.next(Release) == Release(run.transfer, "laptop")


def test_several_messages_in_one_header_are_all_handled(js):
    source = js.caller("laptop")
    runs = [js.run(plain(1, 0, 2, 3, 4, 5), request=bytes([number]) * 16)[0] for number in range(2)]
    _, payload = js.run(plain())
    bodies = [framing.encode_body(message) for message in (runs[0], Moved(runs[0].transfer, "a"), runs[1])]
    source.send(framing.join(bodies), payload, payload)
    assert [source.next(Accept).transfer for _ in range(2)] == [run.transfer for run in runs]
    source.send(framing.join(bodies), payload)
    assert "3 messages in 2 frames" in source.until(Complaint).what


def test_blocks_run_between_stem_and_head_of_others(mixed, tiny_bundle):
    order = (STEM, *range(BLOCKS), HEAD)
    with world_of(mixed, tiny_bundle, a=["stem", *range(BLOCKS), "head"]) as js:
        source, peer = js.caller("laptop"), js.caller("a", role="peer", blocks=(*range(BLOCKS), STEM, HEAD))
        run, payload = js.run(plain(*order[2:], waves=((((STEM, "a"), (0, "a")),),)), hop=2)
        peer.send(run, payload)
        assert peer.next(Accept).transfer == run.transfer
        home, tokens = (source.next(Moved), source.next(Run))[1]
        assert home.itinerary.remaining == (4, 5, HEAD)
        np.testing.assert_allclose(tokens, js.computed(1, 2, 3), rtol=1e-4, atol=1e-4)
        source.send(Accept(home.transfer, 1))
        peer.next(Release)
        peer.send(*js.run(plain(*order[2:-1], waves=((((STEM, "a"), (0, "a")),),)), request=b"s" * 16))
        assert "stem or head alone" in peer.next(Complaint, Accept).what


def test_tokens_that_demand_another_bundle_are_refused(js):
    source = js.caller("laptop")
    run, payload = js.run(plain())
    source.send(msgspec.structs.replace(run, bundle_id="another"), payload)
    assert source.next(Refuse, Accept).reason == "other bundle"
    source.send(msgspec.structs.replace(run, bundle_id=source.hello.bundle_id), payload)
    assert source.next(Refuse, Accept).transfer == run.transfer


def test_blocks_of_a_later_band_do_not_run(banded_js):
    js = banded_js
    source, peer = js.caller("laptop"), js.caller("a", role="peer")
    source.send(*js.run(plain(0, 2, 1, 3, 4, 5)))
    home, tokens = (source.next(Accept), source.next(Run))[1]
    assert (home.itinerary.waves, home.returning) == ((), "unreachable")
    np.testing.assert_array_equal(tokens, js.tokens)
    source.send(Accept(home.transfer, 1))
    peer.send(*js.run(plain(2, 1, 3, 4, 5, waves=BY_A), hop=3, request=b"s" * 16))
    home, _ = (source.next(Release), source.next(Moved), source.next(Run))[2]
    assert home.itinerary.waves == ((((0, "a"), (2, "js"), (1, "js"), (3, "js")),),)
    source.send(Accept(home.transfer, 1))
    for remaining, waves in (((1, 0, 2, 3, 4, 5), ()), ((0, 2, 3, 4, 5), ((((1, "a"),),),))):
        source.send(*js.run(plain(*remaining, waves=waves), request=b"t" * 16))
        assert "outside the bands" in source.next(Complaint).what


def test_tokens_of_a_peer_are_reported_to_the_source_and_released(js):
    source, peer = js.caller("laptop"), js.caller("a", role="peer")
    run, payload = js.run(plain(1, 2, 3, 4, 5, waves=BY_A), hop=4)
    peer.send(run, payload)
    assert peer.next(Accept).transfer == run.transfer
    assert source.next(Moved) == Moved(run.transfer, "a")
    home, _ = source.next(Run)
    assert home.transfer.hop == 5
    assert home.itinerary.waves == ((((0, "a"), (1, "js"), (2, "js"), (3, "js")),),)
    peer.send(Release(run.transfer, "nobody"))  # about what it does not know
    source.send(Accept(home.transfer, 1))
    assert peer.next(Release) == Release(run.transfer, "laptop")


def test_a_track_goes_home_to_its_joiner(js):
    js.caller("laptop")
    joiner = js.caller("a", role="peer")
    itinerary = plain(3, 1, source="a", policy="parallel", track=TrackRef(2**64 - 1, 1, 1, "laptop"))
    run, payload = js.run(itinerary, hop=2)
    joiner.send(run, payload)
    assert joiner.next(Accept).transfer == run.transfer
    home, tokens = joiner.next(Run)
    assert (home.returning, home.itinerary.remaining) == ("done", ())
    assert home.itinerary.track == itinerary.track
    assert home.itinerary.waves == ((((3, "js"), (1, "js")),),)
    np.testing.assert_allclose(tokens, js.computed(3, 1), rtol=1e-4, atol=1e-4)


def test_after_a_wave_a_new_one_begins(js):
    source, peer = js.caller("laptop"), js.caller("a", role="peer")
    waves = ((((0, "a"),), ((1, "js"),)),)
    peer.send(*js.run(plain(2, 3, 4, 5, policy="parallel", waves=waves), hop=3))
    home, _ = (source.next(Moved), source.next(Run))[1]
    assert home.itinerary.waves == (*waves, (((2, "js"), (3, "js")),))


def test_home_goes_on_until_the_source_accepts(js):
    source = js.caller("laptop")
    run, payload = js.run(plain(1, 0, 2, 3, 4, 5))
    source.send(run, payload)
    source.next(Accept)
    first, _ = source.next(Run)
    again, _ = source.next(Run)
    assert again.transfer.branch != first.transfer.branch
    assert (again.transfer.hop, again.itinerary.waves) == (first.transfer.hop, first.itinerary.waves)
    source.send(Cancel((run.transfer.request,), 5_000_000))
    source.send(*js.run(plain(1, 0, 2, 3, 4, 5), branch=6))
    assert source.until(Refuse).reason == "canceled"


def test_nobody_cancels_the_requests_of_others(js):
    source, other = js.caller("laptop"), js.caller("desk")
    other.send(Cancel((b"r" * 16,), 5_000_000))
    assert other.until_welcome() == []
    source.send(*js.run(plain(1, 0, 2, 3, 4, 5)))
    source.next(Accept)
    source.next(Run)


def test_it_refuses_invalid_tokens_and_itineraries(js):
    source, peer = js.caller("laptop"), js.caller("a", role="peer")
    run, payload = js.run(plain())
    source.send(run, np.full(js.shape, np.nan, np.float32).tobytes())
    assert source.next(Refuse) == Refuse(run.transfer, "not finite", 8)
    run, payload = js.run(plain(1, 2, 3, 4, 5, source="nowhere", waves=BY_A))
    peer.send(run, payload)
    assert peer.next(Refuse).reason == "busy"
    for itinerary in (
        plain(1, 2, 3, 4, 5),  # without block 0
        plain(1, 2, 3, 4, 5, skipped=(0,)),
        plain(source="desk"),
        plain(1, source="a", track=TrackRef(1, 0, 0, "laptop")),
    ):
        source.send(*js.run(itinerary))
        source.next(Complaint)
    source.send(run, payload[:-1])
    source.next(Complaint)
    source.send(Bye())
    source.send(*js.run(plain()))
    assert "before hello" in source.next(Complaint).what


STREAMS = {
    "text": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "nothing": b"",
    "half a greeting": b"\xff" + bytes(8) + b"\x7f\x03",
    "ZMTP 2.0": b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00",
    "ZMTP 1.0": b"\x01\x00",
    "another mechanism": b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15 + 32),
    "no READY": b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16 + 32) + b"\x00\x05hello",
    "frame of 2^63 bytes": b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16 + 32) + b"\x02\x7f" + b"\xff" * 7,
    "command cut short": b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16 + 32) + b"\x04\x03\xffRE",
}


def test_garbage_ends_connections_and_not_the_process(js):
    rng = random.Random(1)
    streams = [*STREAMS.values(), *(rng.randbytes(rng.randrange(1, 300)) for _ in range(60))]
    for stream in streams:
        with socket.create_connection(js.peers.address("js"), timeout=5) as connection:
            connection.sendall(stream)
    # One of two frames, one of very many, and mutated headers, from somebody who has greeted.
    source = js.caller("laptop")
    source.send(Bye(), b"more")
    source.next(Complaint)
    source.socket.send_multipart([b"x"] * 500)
    source.next(Complaint)
    for vector in VECTORS["malformed"]:
        source.send(bytes.fromhex(vector["hex"]))
    assert js.peers.alive("js")
    fresh = js.caller("laptop.01234567")
    fresh.send(*js.run(plain(1, 0, 2, 3, 4, 5, source="laptop.01234567")))
    fresh.next(Accept)
    fresh.next(Run)


def test_a_key_that_is_not_in_the_file_gets_no_answer(mixed):
    with mixed({"js": range(BLOCKS)}, "js", keys=True, sources=["laptop"]) as peers, zmq.Context() as context:
        peers.wait_warm()
        known = load_secret(peers.secret_key("laptop"))
        hello = Hello("laptop", "observer", 7, 0, "", "")
        for pair, is_greeted in ((zmq.curve_keypair(), False), ((known.public, known.secret), True)):
            keys = {
                zmq.CURVE_PUBLICKEY: pair[0],
                zmq.CURVE_SECRETKEY: pair[1],
                zmq.CURVE_SERVERKEY: peers.file.peer("js").public_key.encode(),
            }
            one = Caller(context, peers.address("js"), hello, keys)
            one.send(hello)
            assert bool(one.socket.poll(500)) is is_greeted
            one.socket.close(0)
