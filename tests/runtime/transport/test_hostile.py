"""A real peer process, a real peer and a real source under frames that nobody should send, while they work."""

import os
import random
import re
import resource
import threading
from collections import deque
from pathlib import Path

import msgspec
import pytest
import zmq

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import WireError
from ls_edge.core.peer_reports import Visit
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.fleet.local_cluster import LocalCluster
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.protocol import framing
from ls_edge.runtime.protocol.messages import (
    MAJOR,
    MINOR,
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
from ls_edge.runtime.source.source import Source
from ls_edge.runtime.transport.admission import Admission
from ls_edge.runtime.transport.problems import COMPLAINTS_A_SECOND

FRAMES = int(os.environ.get("LS_EDGE_HOSTILE_FRAMES", "5000"))
"""Messages that each of the three gets."""
REQUEST = b"hostile request!"
TRANSFER = TransferId(REQUEST, 1, 0)
ALL = tuple(range(6))


def hello_of(bundle, name="rogue", role="peer", **changes):
    manifest = Bundle.open(bundle).manifest
    hello = Hello(name, role, 77, 0, manifest.model_id, manifest.bundle_id, ALL if role == "peer" else ())
    return msgspec.structs.replace(hello, **changes)


def run_of(bundle, **changes):
    tokens = Bundle.open(bundle).manifest.tokens
    itinerary = Itinerary("laptop", "nearest", ALL, 0)
    run = Run(TRANSFER, 200_000, itinerary, "raw", tokens.count, tokens.dim)
    return msgspec.structs.replace(run, **changes), bytes(tokens.count * tokens.dim * 4)


def some_of_each(bundle):
    run, payload = run_of(bundle)
    halfway = Itinerary(
        "laptop", "nearest", ALL[2:], 3, True, ((((0, "a"), (1, "b")),),), (), (Visit("a", (0,), 1, 2, 3),)
    )
    back = msgspec.structs.replace(run, itinerary=halfway, returning="unreachable")
    state = State(True, False, False, 16, 0, 9, 400, reaches=("a", "laptop"), reach_blocks=ALL)
    plain = [
        hello_of(bundle), hello_of(bundle, "visitor", "source"), state, Bye("x"), Accept(TRANSFER, 1),
        Refuse(TRANSFER, "busy"), Progress(TRANSFER), Release(TRANSFER, "b"), Moved(TRANSFER, "b"),
        Cancel((REQUEST,), 1000), Complaint("x"),
    ]  # fmt: skip
    together = framing.join([framing.encode_body(message) for message in (*plain, run, back)])
    alone = [(framing.encode(message),) for message in plain] + [(framing.encode(r), payload) for r in (run, back)]
    return [*alone, (together, payload, payload)]


class Attacker:
    """Seeded frames, one message after the other."""

    def __init__(self, bundle, mutate, seed):
        self.rng = random.Random(seed)
        self.mutate = mutate
        self.examples = some_of_each(bundle)

    def message(self):
        rng = self.rng
        frames = list(rng.choice(self.examples))
        kind = rng.randrange(12)
        if kind < 8:
            frames[0] = self.mutate(frames[0], rng)
        elif kind == 8:
            frames[-1] = frames[-1][: rng.randrange(len(frames[-1]))]
        elif kind == 9:
            frames += [rng.randbytes(rng.randrange(20)) for _ in range(rng.randrange(1, 60))]
        elif kind == 10:
            frames = [b""] * rng.randrange(1, 5)
        return frames


def drain(socket):
    """Read all that has come; a router's first frame says from whom."""
    messages = []
    while socket.poll(0):
        messages.append(socket.recv_multipart())
    return messages


class Flood(threading.Thread):
    """Dials two peers, is dialed by everybody as ``rogue``, and sends all of them what it likes."""

    def __init__(self, sockets, file, bundle, mutate):
        super().__init__(name="flood")
        self.attackers = {name: Attacker(bundle, mutate, seed) for seed, name in enumerate(("a", "b", "rogue"))}
        self.dealers = {name: sockets(zmq.DEALER, dial=file.peer(name).address) for name in ("a", "b")}
        self.router = sockets(zmq.ROUTER, bind=file.peer("rogue").address)
        self.greeting = framing.encode(Welcome(*msgspec.structs.astuple(hello_of(bundle))))
        self.state = framing.encode(State(True, False, False, 4, 0, 0, 100, reaches=("a", "b"), reach_blocks=ALL))
        self.callers = {}
        self.sent = dict.fromkeys(("a", "b", "source"), 0)
        self.halt = threading.Event()

    def run(self):
        while not self.halt.is_set() and min(self.sent.values()) < FRAMES:
            for name, dealer in self.dealers.items():
                drain(dealer)
                self.burst(dealer, self.attackers[name], name)
            for caller, *frames in drain(self.router):
                self.meet(caller, frames)
            for caller, name in self.callers.items():
                self.burst(self.router, self.attackers["rogue"], name, [caller])
            self.halt.wait(0.002)

    def meet(self, caller, frames):
        """Welcome who says hello, so that what follows comes from a neighbor who looks useful."""
        message = framing.decode(frames[0])[0]
        if isinstance(message, Hello) and caller not in self.callers:
            self.callers[caller] = "source" if message.role == "source" else message.name
            self.router.send_multipart([caller, self.greeting])
            self.router.send_multipart([caller, self.state])

    def burst(self, socket, attacker, name, to=()):
        for _ in range(15):
            if self.sent[name] >= FRAMES:
                return
            try:
                socket.send_multipart([*to, *attacker.message()], zmq.NOBLOCK)
            except zmq.Again:
                return
            self.sent[name] += 1


def resident_mib(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def test_everybody_lives_and_answers_under_thousands_of_broken_frames(
    tiny_bundle, tmp_path, serve, sockets, mutate, images, assert_replays
):
    bundle = Bundle.open(tiny_bundle)
    local = LocalCluster(tmp_path / "peers", tiny_bundle, {"a": ALL[:4], "b": ALL[2:], "rogue": ALL})
    try:
        local.start("a")
        peer = serve(Peer(local.file, "b", bundle))
        local.wait_warm("a")
        flood = Flood(sockets, local.file, tiny_bundle, mutate)
        with Source(local.file, bundle, name="laptop") as source:
            flood.start()
            try:
                assert source.wait_ready(30) == ()
                batch, answers = [], []
                while flood.is_alive() or len(answers) < 20:
                    some = images(4, seed=len(batch))
                    futures = [source.submit(image) for image in some]
                    batch += list(some)
                    answers += [future.result(20) for future in futures]
                    if len(answers) == 4 or min(flood.sent.values()) < FRAMES // 3:
                        early = resident_mib(local.processes["a"].pid)
            finally:
                flood.halt.set()
                flood.join()
            counts = source.snapshot.dropped
            assert local.alive("a")
            assert min(flood.sent.values()) == FRAMES
            assert resident_mib(local.processes["a"].pid) < early + 16
        assert_replays(tiny_bundle, batch, answers)
        assert not any(answer.degraded for answer in answers)
        assert all(name != "rogue" for answer in answers for _, name in answer.record.steps)
        assert counts["malformed"] > FRAMES // 4
        assert peer.node.counts["malformed"] > FRAMES // 4
        assert peer.node.counts["before hello"] > 0
        assert peer.node.counts["hello refused"] > 0
        assert local.log_path("a").stat().st_size < 200_000
        assert local.terminate("a") == 0
    finally:
        local.close()


@pytest.fixture
def peer(tiny_bundle, write_peers, serve, wait_until):
    """A warm peer called ``a``; ``b`` stands in its file too and does not run."""
    file = load_peers(write_peers({"a": ALL, "b": ALL}))
    one = serve(Peer(file, "a", Bundle.open(tiny_bundle)))
    wait_until(lambda: one.machine.rules.warm, what="warm engines")
    return one


class Caller:
    """A raw socket that dialed a peer; messages that it hears, by type."""

    def __init__(self, socket):
        self.socket = socket
        self.heard = deque()

    def says(self, *frames):
        self.socket.send_multipart([frame if isinstance(frame, bytes) else framing.encode(frame) for frame in frames])

    def hears(self, kind):
        """The next message of a kind; what comes before it is dropped."""
        while True:
            while not self.heard:
                assert self.socket.poll(10_000), f"waited in vain for {kind.__name__}"
                self.heard.extend(framing.decode(self.socket.recv_multipart()[0]))
            message = self.heard.popleft()
            if isinstance(message, kind):
                return message


@pytest.fixture
def caller(peer, sockets):
    return Caller(sockets(zmq.DEALER, dial=peer.entry.address))


def test_before_hello_nothing_is_done(peer, caller, tiny_bundle):
    run, payload = run_of(tiny_bundle)
    strangers = [
        Accept(TRANSFER, 1),
        Release(TRANSFER, "b"),
        Cancel((REQUEST,), 1),
        State(True, False, False, 1, 0, 0, 1),
    ]
    for number, message in enumerate((run, *strangers), 1):
        caller.says(message, *([payload] if message is run else []))
        assert "before hello" in caller.hears(Complaint).what
        assert peer.node.counts["before hello"] == number
    assert not peer.machine.held
    assert not peer.machine.rules.tombstones.until
    assert not peer.machine.neighbors.by_name


REFUSED = {
    "unknown peer": ({"name": "stranger"}, "peer 'stranger' is not in .*peers.yaml; add it there"),
    "its own name": ({"name": "a"}, "hello from 'a'"),
    "peer's name as a source": ({"name": "b", "role": "source"}, "'b' is a peer of"),
    "another role": ({"name": "b", "role": "king"}, "as 'king': not a process of this fleet"),
    "another model": ({"name": "b", "model_id": "f" * 64}, "b has model f{12}, a has [0-9a-f]{12};"),
    "block that the model lacks": ({"name": "b", "blocks": (0, 6)}, "b announces block 6, which .* does not give it"),
}


@pytest.mark.parametrize(("changes", "said"), REFUSED.values(), ids=REFUSED)
def test_hello_is_refused(peer, caller, tiny_bundle, changes, said):
    caller.says(hello_of(tiny_bundle, **changes))
    assert re.search(said, caller.hears(Complaint).what)
    assert peer.node.counts["hello refused"] == 1
    assert not peer.machine.neighbors.by_name
    assert set(peer.node.mismatched) == ({"b"} if "model_id" in changes else set())


def malformed(bundle):
    run, payload = run_of(bundle)
    header = framing.encode(run)
    it = run.itinerary

    def other(**changes):
        return framing.encode(msgspec.structs.replace(run, **changes)), payload

    def way(**changes):
        return other(itinerary=msgspec.structs.replace(it, **changes))

    return {
        "tokens too short": ((header, payload[:-1]), "tokens frame of 2047 bytes, 2048 expected"),
        "tokens too long": ((header, payload + b"x"), "tokens frame of 2049 bytes"),
        "no tokens": ((header, b""), "tokens frame of 0 bytes"),
        "another codec than the length": (other(codec="fp16"), "1024 expected for 16 x 32 as fp16"),
        "codec of the future": (other(codec="fp4"), "unknown codec 'fp4'"),
        "another shape": (other(count=32, dim=16), "tokens 32 x 16, the model has 16 x 32"),
        "block that the model lacks": (way(remaining=(*ALL, 6)), "itinerary with blocks .*, the model has 0 to 5"),
        "block that has gone missing": (way(remaining=ALL[1:]), "itinerary with blocks"),
        "nothing left of it": (way(remaining=()), "itinerary with blocks"),
        "track for a stranger": (way(track=TrackRef(1, 0, 0, "laptop"), source="king"), "track of blocks .* for king"),
        "track for a source": (way(track=TrackRef(1, 0, 0, "laptop")), "track of blocks .* for laptop"),
        "track that the model lacks": (
            way(track=TrackRef(1, 0, 0, "laptop"), source="b", remaining=(6,)), r"track of blocks \[6\]",
        ),
        "track behind the end": (way(track=TrackRef(1, 0, 7, "laptop"), source="b"), "track of blocks"),
        "run without tokens": ((header,), "run in 1 frames, 2 are needed"),
        "tokens with a bye": ((framing.encode(Bye()), payload), "bye in 2 frames, 1 are needed"),
        "three frames": ((header, payload, b""), "run in 3 frames, 2 are needed"),
        "many frames": ((header, *([b""] * 500)), "message of 501 frames"),
        "empty frame": ((b"",), "not an ls-edge message"),
        "empty frames": ((b"", b""), "not an ls-edge message"),
        "older version": ((b"LS\0" + header[3:], payload), "protocol version 0 was received and this is version 1"),
        "state of a source": (
            (framing.encode(State(True, False, False, 1, 0, 0, 1, reaches=("ghost",))),), "state of laptop",
        ),
    }  # fmt: skip


def test_a_state_that_names_a_block_that_the_model_lacks_is_malformed(tiny_bundle, write_peers):
    peers = load_peers(write_peers({"a": ALL, "b": ALL}))
    admission = Admission("a", "peer", peers, Bundle.open(tiny_bundle).manifest, strict_bundle=False)
    with pytest.raises(WireError, match="state names block 6"):
        admission.check_state(State(True, False, False, 1, 0, 0, 1, reach_blocks=(6,)), "b")


def test_a_neighbor_that_sends_nonsense_is_told_and_stays_a_neighbor(peer, sockets, caller, tiny_bundle, wait_until):
    cases = malformed(tiny_bundle)
    for number, (what, (frames, said)) in enumerate(cases.items(), 1):
        if number % COMPLAINTS_A_SECOND == 1:  # it would be told no more in this second
            caller.socket.close()
            wait_until(lambda: not peer.machine.neighbors.by_name, what="the end of its link")
            caller = Caller(sockets(zmq.DEALER, dial=peer.entry.address))
            caller.says(hello_of(tiny_bundle, "laptop", "source"))
            assert caller.hears(Welcome).name == "a"
        caller.says(*frames)
        assert re.search(said, caller.hears(Complaint).what), what
        assert peer.node.counts["malformed"] == number
    assert not peer.machine.held
    run, payload = run_of(tiny_bundle)
    caller.says(run, payload)
    assert caller.hears(Accept).transfer == TRANSFER
    answer = caller.hears(Run)
    assert answer.itinerary.remaining == ()
    assert answer.transfer[:2] == TRANSFER[:2]


def with_more(message, **fields):
    """The header of a message with fields that this version does not know."""
    plain = msgspec.to_builtins(message, builtin_types=(bytes,))
    return framing.encode(message)[:3] + msgspec.msgpack.encode({**plain, **fields})


def test_a_process_of_a_newer_minor_version_is_understood_as_far_as_this_one_knows_it(peer, caller, tiny_bundle):
    caller.says(with_more(hello_of(tiny_bundle, "laptop", "source", minor=MINOR + 7), shape=[1, 2]))
    assert caller.hears(Welcome).minor == MINOR
    assert peer.machine.neighbors.get("laptop").hello.minor == MINOR + 7
    run, payload = run_of(tiny_bundle, budget_us=20_000_000)
    itinerary = [*msgspec.to_builtins(run.itinerary), "a new value"]
    caller.says(with_more(run, itinerary=itinerary, urgency=9), payload)
    assert caller.hears(Accept).transfer == run.transfer
    assert caller.hears(Run).returning == "done"
    caller.says(framing.encode(Bye())[:3] + msgspec.msgpack.encode({"t": "walk"}))
    assert "malformed" in caller.hears(Complaint).what
    caller.says(hello_of(tiny_bundle, "laptop", "source", minor=MINOR + 7))
    assert caller.hears(Welcome).name == "a"  # still linked


def test_a_message_of_another_major_version_is_refused_with_both_versions(peer, caller, tiny_bundle):
    header = bytearray(framing.encode(hello_of(tiny_bundle, "laptop", "source")))
    header[2] = MAJOR + 1
    caller.says(bytes(header))
    assert f"version {MAJOR + 1} was received and this is version {MAJOR}" in caller.hears(Complaint).what
    assert "laptop" not in peer.machine.neighbors.by_name


def together(*messages):
    return framing.join([framing.encode_body(message) for message in messages])


def test_a_frame_beyond_the_models_size_ends_the_connection_alone(peer, sockets, caller, tiny_bundle, wait_until):
    caller.says(hello_of(tiny_bundle, "laptop", "source"))
    caller.hears(Welcome)
    rude = Caller(sockets(zmq.DEALER, dial=peer.entry.address))
    rude.says(hello_of(tiny_bundle, "rude", "source"))
    rude.hears(Welcome)
    run, _ = run_of(tiny_bundle)
    rude.says(run, bytes(1 << 20))
    wait_until(lambda: "rude" not in peer.machine.neighbors.by_name, what="the end of its link")
    assert "laptop" in peer.machine.neighbors.by_name
    caller.says(b"?")
    caller.hears(Complaint)


def test_processes_that_greet_and_vanish_leave_room_for_others(peer, sockets, tiny_bundle, wait_until, monkeypatch):
    monkeypatch.setattr("ls_edge.runtime.transport.handshake.MAX_SOURCES", 10)
    for number in range(10):
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 5000
            dealer.connect(peer.entry.address)
            dealer.send(framing.encode(hello_of(tiny_bundle, f"visitor-{number}", "source")))

    def admitted():
        other = Caller(sockets(zmq.DEALER, dial=peer.entry.address))
        other.says(hello_of(tiny_bundle, "visitor-10", "source"))
        assert other.socket.poll(10_000)
        return isinstance(framing.decode(other.socket.recv_multipart()[0])[0], Welcome)

    wait_until(admitted, what="room for another")
