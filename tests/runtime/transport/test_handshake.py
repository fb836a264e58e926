"""The greeting between real peers and scripted implementations that lose messages, or answer what needs no answer."""

import time

import msgspec
import pytest
import yaml
import zmq

from ls_edge.core.bundle import Bundle
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.protocol import framing
from ls_edge.runtime.protocol.messages import Bye, Complaint, Hello, State, Welcome
from ls_edge.runtime.source.source import Source
from ls_edge.runtime.transport.handshake import GREETING_DELAY, MAX_GREETING_DELAY, MAX_SOURCES, REST_AFTER
from ls_edge.runtime.transport.problems import COMPLAINTS_A_SECOND

ALL = tuple(range(6))


@pytest.fixture
def bundle(tiny_bundle):
    return Bundle.open(tiny_bundle)


@pytest.fixture
def hello_of(bundle):
    def make(name, role="peer", **changes):
        m = bundle.manifest
        hello = Hello(name, role, 77, 0, m.model_id, m.bundle_id, ALL if role == "peer" else ())
        return msgspec.structs.replace(hello, **changes)

    return make


@pytest.fixture
def file(write_peers):
    return load_peers(write_peers({"a": ALL[:4], "b": ALL}))


@pytest.fixture
def peer(file, bundle, serve, wait_until):
    """A warm peer ``a``: its description does not change any more."""
    one = serve(Peer(file, "a", bundle))
    wait_until(lambda: one.machine.rules.warm, what="warm engines")
    return one


class Script:
    """A raw socket and all that it has heard, with the time of it."""

    def __init__(self, socket):
        self.socket = socket
        self.heard = []
        self.passed = 0
        """Number of messages that :meth:`hears` has looked at."""
        self.caller = []

    def listen(self, seconds):
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self.socket.poll(left * 1000):
                self.take()
        self.passed = len(self.heard)

    def take(self):
        frames = self.socket.recv_multipart()
        if self.socket.type == zmq.ROUTER:
            self.caller = frames[:1]
            frames = frames[1:]
        self.heard += framing.decode(frames[0])

    def says(self, message):
        self.socket.send_multipart([*self.caller, framing.encode(message)])

    def hears(self, kind):
        """Return the next message of a kind."""
        while True:
            while self.passed == len(self.heard):
                assert self.socket.poll(10_000), f"waited in vain for {kind.__name__}"
                self.take()
            self.passed += 1
            if isinstance(self.heard[self.passed - 1], kind):
                return self.heard[self.passed - 1]

    def count(self, kind):
        return sum(isinstance(message, kind) for message in self.heard)


def most_hellos(seconds):
    """How often a HELLO that nobody answers may have been said after a time: at once, and then on its timer."""
    count, wait = 1, GREETING_DELAY
    while seconds >= wait:
        seconds, count, wait = seconds - wait, count + 1, min(2 * wait, MAX_GREETING_DELAY)
    return count


def test_a_hello_that_is_lost_is_repeated_on_a_timer_until_it_is_welcomed(file, peer, sockets, hello_of):
    b = Script(sockets(zmq.ROUTER, bind=file.peer("b").address))
    b.hears(Hello)
    since = time.monotonic()
    b.hears(Hello)  # the first one got lost here
    b.hears(Hello)
    assert b.count(Hello) <= most_hellos(time.monotonic() - since + 0.2)
    b.says(Welcome(*msgspec.structs.astuple(hello_of("b"))))
    b.hears(State)  # it knows us now
    said = b.count(Hello)
    b.listen(3 * GREETING_DELAY)
    assert b.count(Hello) <= said + 1  # the next one may have been on its way
    assert b.count(Welcome) == 0
    assert peer.machine.neighbors.get("b") is not None


def test_a_greeting_is_finite_with_one_that_loses_and_one_that_answers_everything_with_hello(
    file, peer, sockets, hello_of
):
    """By the rules of version 1 the two of them said HELLO to one another for ever after one was lost."""
    b = Script(sockets(zmq.ROUTER, bind=file.peer("b").address))
    dials = Script(sockets(zmq.DEALER, dial=file.peer("a").address))
    since = time.monotonic()
    dials.says(hello_of("b"))
    lost, said = [], 1
    while time.monotonic() < since + 2.0:
        for script in (b, dials):
            while script.socket.poll(5):
                message = script.take()
                if not isinstance(message, (Hello, Welcome)):
                    continue
                if not lost:
                    lost.append(message)  # never heard
                elif isinstance(message, Hello):  # answered as if it were not known, which asks for no HELLO in return
                    script.says(hello_of("b"))
                    said += 1
    elapsed = time.monotonic() - since
    hellos = b.count(Hello) + dials.count(Hello)
    # One timer for the link that a dialed, and HELLO to whom it knows when its description changes, which it does not.
    assert 1 <= hellos <= most_hellos(elapsed) + 1
    assert b.count(Welcome) + dials.count(Welcome) <= said
    assert said <= hellos + 1


def test_each_hello_has_one_welcome_and_welcome_has_no_answer(peer, file, sockets, hello_of):
    caller = Script(sockets(zmq.DEALER, dial=file.peer("a").address))
    for _ in range(20):
        caller.says(hello_of("laptop", "source"))
        assert caller.hears(Welcome).name == "a"
        caller.says(Welcome(*msgspec.structs.astuple(hello_of("laptop", "source"))))
        caller.says(Complaint("that I was welcomed"))
    caller.says(hello_of("laptop", "source"))
    caller.hears(Welcome)
    assert caller.count(Welcome) == 21
    assert caller.count(Hello) == caller.count(Complaint) == 0


def test_the_processes_that_are_known_at_once_are_bounded(peer, file, sockets, hello_of, wait_until):
    callers = [Script(sockets(zmq.DEALER, dial=file.peer("a").address)) for _ in range(MAX_SOURCES + 1)]
    for number, caller in enumerate(callers[:-1]):
        caller.says(hello_of(f"source-{number}", "source"))
    for caller in callers[:-1]:
        caller.hears(Welcome)
    callers[-1].says(hello_of("late", "source"))
    assert (
        callers[-1].hears(Complaint).what
        == f"{MAX_SOURCES} sources are linked to a, which is the limit; try again later"
    )
    callers[-1].says(hello_of("b"))  # a peer of the file is no stranger
    callers[-1].hears(Welcome)
    wait_until(lambda: len(peer.machine.neighbors.by_name) == MAX_SOURCES + 1, what="b to be known")
    callers[0].socket.close()
    wait_until(lambda: "source-0" not in peer.machine.neighbors.by_name, what="the end of a link")
    again = Script(sockets(zmq.DEALER, dial=file.peer("a").address))
    again.says(hello_of("late", "source"))
    again.hears(Welcome)


def test_complaints_are_throttled_on_each_link(peer, file, sockets, wait_until):
    loud, quiet = (Script(sockets(zmq.DEALER, dial=file.peer("a").address)) for _ in range(2))
    since = time.monotonic()
    for _ in range(900):
        loud.socket.send(b"?")
    wait_until(lambda: peer.node.counts["malformed"] == 900, 30.0, "all to be read")
    quiet.socket.send(b"?")
    quiet.hears(Complaint)
    elapsed = time.monotonic() - since
    while loud.socket.poll(50):
        loud.take()
    assert 1 <= loud.count(Complaint) <= COMPLAINTS_A_SECOND * (elapsed + 1)
    assert peer.node.counts["malformed"] == 901


@pytest.mark.parametrize(
    ("name", "role", "blocks", "said"),
    [
        ("b", "peer", (0, 1, 6), "b announces block 6, which {} does not give it; copy the same peers.yaml to both"),
        ("laptop", "source", (0,), "source 'laptop' announces blocks, and sources have none"),
    ],
)
def test_blocks_that_cannot_be_are_refused(peer, file, sockets, hello_of, name, role, blocks, said):
    caller = Script(sockets(zmq.DEALER, dial=file.peer("a").address))
    caller.says(hello_of(name, role, blocks=blocks))
    assert caller.hears(Complaint).what == said.format(file.path)
    assert not peer.machine.neighbors.by_name


def test_a_process_at_the_address_of_another_is_refused(peer, file, sockets, hello_of):
    b = Script(sockets(zmq.ROUTER, bind=file.peer("b").address))
    b.hears(Hello)
    b.says(Welcome(*msgspec.structs.astuple(hello_of("laptop", "source"))))
    said = f"the process that listens at the address of 'b' is 'laptop'; correct the addresses in {file.path}"
    assert b.hears(Bye).reason == said[:200]
    assert peer.node.problems["b"] == said
    assert not peer.machine.neighbors.by_name


@pytest.fixture
def scripted_pair(file, bundle, serve, sockets, hello_of):
    """A peer ``b``, and both sockets of a script that is ``a``: the listener that ``b`` dials, and a caller."""

    listeners = []

    def make(*incarnations):
        b = serve(Peer(file, "b", bundle))
        listener = Script(sockets(zmq.ROUTER, bind=file.peer("a").address))
        ends = listener.socket.get_monitor_socket(zmq.Event.DISCONNECTED)
        listeners.append((listener.socket, ends))
        hello = hello_of("a", blocks=ALL[:4])
        listener.hears(Hello)
        listener.says(Welcome(*msgspec.structs.astuple(msgspec.structs.replace(hello, incarnation=incarnations[0]))))
        caller = Script(sockets(zmq.DEALER, dial=file.peer("b").address))
        caller.says(msgspec.structs.replace(hello, incarnation=incarnations[1]))
        caller.hears(Welcome)
        return b, listener, caller, ends

    yield make
    for socket, ends in listeners:
        socket.disable_monitor()
        ends.close(0)


def test_the_connection_that_the_greater_name_dialed_is_closed_and_dialed_again(scripted_pair, wait_until):
    b, listener, caller, ends = scripted_pair(77, 77)
    assert ends.poll(10_000), "the second connection stays"
    assert b.snapshot.linked == {"a"}
    caller.says(Complaint("any message"))  # the first connection carries messages as before
    wait_until(lambda: "a" in b.node.problems, what="a message")
    listener.listen(0.1)
    caller.socket.close()
    assert listener.hears(Hello).name == "b"


def test_a_connection_of_an_earlier_process_does_not_replace_one(scripted_pair):
    b, _, _, ends = scripted_pair(78, 77)
    assert not ends.poll(1000 * REST_AFTER + 500)
    assert b.snapshot.linked == {"a"}


def test_when_one_of_two_processes_of_a_name_leaves_the_other_one_greets_again(
    file, peer, sockets, hello_of, wait_until
):
    """As where a peer is replaced by one on another machine that was started first."""
    leaves, stays = (Script(sockets(zmq.DEALER, dial=file.peer("a").address)) for _ in range(2))
    for one, incarnation in ((leaves, 77), (stays, 78)):
        one.says(hello_of("b", incarnation=incarnation))
        one.hears(Welcome)
    ends = stays.socket.get_monitor_socket(zmq.Event.DISCONNECTED)
    leaves.says(Bye("draining"))
    has_ended = ends.poll(5_000)
    stays.socket.disable_monitor()
    ends.close(0)
    assert has_ended, "its link stays, so it does not greet again"
    stays.says(hello_of("b", incarnation=78))
    stays.hears(Welcome)
    wait_until(lambda: peer.snapshot.linked == {"b"})


def test_a_refused_peer_is_used_once_the_file_gives_it_its_blocks(file, peer, bundle, wait_until):
    older = file.path.with_name("older.yaml")
    document = yaml.safe_load(file.path.read_text())
    document["peers"] = [{**one, "blocks": [0, 1]} for one in document["peers"] if one["name"] == "a"]
    older.write_text(yaml.safe_dump(document))
    with Source(load_peers(older), bundle) as source:
        wait_until(lambda: "does not give it" in source.snapshot.problems.get("a", ""), what="a refusal")
        older.write_text(file.path.read_text())
        source.reload()
        wait_until(lambda: "a" not in source.snapshot.problems and source.link_counts.suspicions == {"a": 0, "b": 0})
