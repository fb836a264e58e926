"""Real sockets on the loopback: links that come up, end, are killed, come back, and are sent what they cannot take."""

import contextlib
import select
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from ls_edge.core.errors import LinkError
from ls_edge.core.peers_file import HeartbeatSettings
from ls_edge.runtime.fleet.local_cluster import free_ports
from ls_edge.runtime.transport.connections import MAX_UNSENT, Incoming, Link, LinkDown, LinkUp, NoLink
from ls_edge.runtime.transport.keys import KeyPair
from ls_edge.runtime.transport.links import ZERO_COPY_FROM, Links
from ls_edge.runtime.transport.zap import Curve
from tests.faults.own_network import in_own_network, needs_own_network
from tests.faults.proxy import Proxy

MAX_FRAME = 200_000

ECHO = """
import sys
from ls_edge.core.peers_file import HeartbeatSettings
from ls_edge.runtime.transport.connections import Incoming, LinkDown
from ls_edge.runtime.transport.links import Links

size, count = int(sys.argv[2]), int(sys.argv[3])
links = Links({}, bind=sys.argv[1], heartbeat=HeartbeatSettings(), max_frame=size, tokens_frame=size)
downs = 0
while True:
    for event in links.poll(1.0):
        downs += isinstance(event, LinkDown)
        if isinstance(event, Incoming) and event.frames[0].bytes == b"go":
            for _ in range(count):
                links.send(event.link, [b"tokens", bytes(size)])
        elif isinstance(event, Incoming) and event.frames[0].bytes == b"downs?":
            links.send(event.link, [b"downs", str(downs).encode()])
"""

LATE = """
import sys, time
from ls_edge.core.peers_file import HeartbeatSettings
from ls_edge.runtime.transport.connections import Incoming
from ls_edge.runtime.transport.links import Links

links = Links({}, bind=sys.argv[1], heartbeat=HeartbeatSettings(), max_frame=1000)
print("listens", flush=True)
sys.stdin.readline()
time.sleep(0.5)  # heartbeats are due meanwhile
count = 0
while count < int(sys.argv[2]):
    count += sum(isinstance(event, Incoming) for event in links.poll(0.1))
print(count, flush=True)
"""

GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
"""Of ZMTP 3.1."""


def shake_hands(raw, kind):
    """Be a socket of ZeroMQ of this type, up to the end of the handshake."""
    body = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind.encode()
    raw.sendall(GREETING + b"\x04" + bytes([len(body)]) + body)
    heard = b""
    while b"READY" not in heard:  # what we said before that would be a mistake
        heard += raw.recv(1000)


def ended(raw):
    """Whether the other side has closed its end of a connection; reads what it sent before that."""
    while select.select([raw], [], [], 0)[0]:
        try:
            if not raw.recv(1000):
                return True
        except ConnectionError:
            return True
    return False


DIALLER = """
import sys
from ls_edge.core.peers_file import HeartbeatSettings
from ls_edge.runtime.transport.connections import Link, LinkUp
from ls_edge.runtime.transport.links import Links

links = Links({"a": sys.argv[1]}, bind=None, heartbeat=HeartbeatSettings(), max_frame=1000)
while True:
    if any(isinstance(event, LinkUp) for event in links.poll(1.0)):
        links.send(Link("a"), [b"hello"])
"""


class End:
    """Links of one process, with what happened to them."""

    def __init__(self, dial, bind=None, **options):
        settings = {"heartbeat": HeartbeatSettings(), "max_frame": MAX_FRAME, **options}
        self.links = Links(dial, bind=bind, **settings)
        self.events = []
        self.is_closed = False

    def poll(self, timeout=0.005):
        if not self.is_closed:
            self.events += self.links.poll(timeout)

    def close(self):
        self.is_closed = True
        self.links.close()

    def frames(self):
        return [[frame.bytes for frame in event.frames] for event in self.events if isinstance(event, Incoming)]

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


def num_incoming(links):
    """Number of incoming connections that are open, or whose end was not read yet."""
    kept = links._listener
    return max(len(kept._accepted | kept._links_at.keys()), len(kept.descriptor_of))


@pytest.fixture
def address():
    return f"tcp://127.0.0.1:{free_ports(1)[0]}"


@pytest.fixture
def end(wait_until):
    """Open ends; ``end.until(true)`` lets all of them work until something is true."""
    made = []

    def make(*arguments, **options):
        made.append(End(*arguments, **options))
        return made[-1]

    def until(true, what):
        def look():
            for one in made:
                one.poll()
            return true()

        wait_until(look, what=what)

    make.until = until
    yield make
    for one in made:
        one.close()


def linked(end, address, **options):
    """A process that listens and one that dialed it and said ``hi``."""
    listener, dialler = end({}, bind=address, **options), end({"a": address}, **options)
    end.until(lambda: dialler.of(LinkUp), "a link")
    assert dialler.links.send(Link("a"), [b"hi"])
    end.until(listener.frames, "a message")
    return listener, dialler


@pytest.mark.leaks_ok("pyzmq starts one thread for good when a frame is first sent without a copy")
def test_messages_go_both_ways(end, address):
    listener, dialler = linked(end, address, max_frame=2 * ZERO_COPY_FROM)
    (incoming,) = listener.of(Incoming)
    assert incoming.user == ""
    assert incoming.link.routing_id
    assert dialler.of(LinkUp) == [LinkUp(Link("a"))]
    tokens = bytes(range(256)) * (ZERO_COPY_FROM // 1024)  # copied
    large = bytes(range(256)) * (ZERO_COPY_FROM // 128)  # not copied
    assert listener.links.send(incoming.link, [b"header", tokens])
    assert listener.links.send(incoming.link, [b"header", large])
    end.until(lambda: len(dialler.frames()) == 2, "the answers")
    assert dialler.frames() == [[b"header", tokens], [b"header", large]]
    assert dialler.of(Incoming)[0].link == Link("a")
    assert dialler.of(Incoming)[0].user == "a"


def test_the_end_of_a_link_is_seen_by_both_sides(end, address):
    listener, dialler = linked(end, address)
    dialler.close()
    end.until(lambda: listener.of(LinkDown), "the end")
    assert listener.of(LinkDown) == [LinkDown(listener.of(Incoming)[0].link, "connection lost")]
    other = end({"a": address})
    end.until(lambda: other.of(LinkUp), "a link")
    listener.close()
    end.until(lambda: other.of(LinkDown), "the end")
    assert other.of(LinkDown) == [LinkDown(Link("a"), "connection lost")]


def test_a_lost_link_is_dialed_again(end, address):
    listener, dialler = linked(end, address)
    listener.close()
    end.until(lambda: dialler.of(LinkDown), "the end")
    # libzmq's own thread reports the end a moment before the socket refuses messages.
    end.until(lambda: not dialler.links.send(Link("a"), [b"lost"]), "the refusal")
    again = end({}, bind=address)
    end.until(lambda: len(dialler.of(LinkUp)) == 2, "the link again")
    assert dialler.links.send(Link("a"), [b"found"])
    end.until(again.frames, "a message")
    assert again.frames() == [[b"found"]]


def test_a_dialed_process_may_start_later(end, address):
    dialler = end({"a": address})
    end.until(lambda: len(dialler.events) > 1, "two attempts")
    said = f"nobody answers at {address}; start it, or correct its address in peers.yaml"
    assert set(dialler.events) == {NoLink("a", said)}
    assert not dialler.links.send(Link("a"), [b"nobody there"])
    end({}, bind=address)
    end.until(lambda: dialler.of(LinkUp), "a link")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_killed_or_stopped_is_seen(end, address, number):
    listener = end({}, bind=address)
    process = subprocess.Popen([sys.executable, "-c", DIALLER, address])
    try:
        end.until(listener.frames, "its message")
        process.send_signal(number)
        end.until(lambda: listener.of(LinkDown), "its end")
        assert [event.link for event in listener.of(LinkDown)] == [listener.of(Incoming)[0].link]
        if number == signal.SIGSTOP:
            process.send_signal(signal.SIGCONT)
            end.until(lambda: len(listener.frames()) == 2, "its return")
    finally:
        process.kill()
        process.wait()


def test_an_end_that_came_before_its_message_was_read_is_found_by_sending(end, address):
    listener = end({}, bind=address)
    for number in range(8):
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 5000
            dealer.connect(address)
            dealer.send(b"hi")  # leaving the block waits until it has been sent, and ends the connection
        end.until(lambda n=number: len(listener.frames()) == n + 1, "the message")
        link = listener.of(Incoming)[-1].link
        end.until(
            lambda one=link: not listener.links.send(one, [b"x"]) and one in [e.link for e in listener.of(LinkDown)],
            "its end",
        )
    assert {event.link for event in listener.of(LinkDown)} == {event.link for event in listener.of(Incoming)}


def test_a_frame_that_is_too_long_ends_only_its_connection(end, address):
    listener, dialler = linked(end, address)
    bystander = end({"a": address})
    end.until(lambda: bystander.of(LinkUp), "a second link")
    assert bystander.links.send(Link("a"), [b"x" * MAX_FRAME])
    end.until(lambda: len(listener.frames()) == 2, "the longest frame that is allowed")
    assert dialler.links.send(Link("a"), [b"x" * (MAX_FRAME + 1)])
    end.until(lambda: dialler.of(LinkDown) and listener.of(LinkDown), "the end of that link")
    assert len(listener.of(LinkDown)) == 1
    assert not bystander.of(LinkDown)
    end.until(lambda: len(dialler.of(LinkUp)) == 2, "the link again")
    assert dialler.links.send(Link("a"), [b"short"])
    assert bystander.links.send(Link("a"), [b"still here"])
    end.until(lambda: len(listener.frames()) == 4, "messages from both")


def test_bytes_that_are_no_protocol_do_no_harm(end, address):
    listener, dialler = linked(end, address)
    port = int(address.rpartition(":")[2])
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 300,
        b"\xff" * 300,
        b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00NULL",
        b"",
    ):
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(garbage)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert dialler.links.send(Link("a"), [b"still here"])
    end.until(lambda: len(listener.frames()) == 2, "a message")
    assert not listener.of(LinkDown)


def test_a_port_in_use_is_said(end, address):
    end({}, bind=address)
    with pytest.raises(LinkError, match=f"{address} is in use; stop the process that listens there"):
        Links({}, bind=address, heartbeat=HeartbeatSettings(), max_frame=MAX_FRAME)


def test_an_address_of_another_machine_is_said():
    with pytest.raises(LinkError, match=r"cannot listen on tcp://192\.0\.2\.1:5555: .*; 'bind' in peers.yaml must be"):
        Links({}, bind="tcp://192.0.2.1:5555", heartbeat=HeartbeatSettings(), max_frame=MAX_FRAME)


def test_a_queue_that_is_full_is_said_and_not_waited_for(end):
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialler = end({"a": f"tcp://127.0.0.1:{server.getsockname()[1]}"})
        with server.accept()[0] as silent:
            shake_hands(silent, "ROUTER")
            end.until(lambda: dialler.of(LinkUp), "the link")
            sent = 0
            while sent < 10_000 and dialler.links.send(Link("a"), [b"header", bytes(MAX_FRAME)]):
                sent += 1
            assert MAX_UNSENT <= sent < 1000  # what the kernel took is beyond that


def test_another_thread_wakes_the_poll(end, address):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        one = end({}, bind=address)
        one.links.poller.add_descriptor(ours.fileno())
        theirs.send(b"x")
        one.poll(60.0)  # returns at once, or the test runs into its time limit
        assert not one.events


@pytest.mark.skipif(not zmq.has("curve"), reason="libzmq was built without CURVE")
def test_a_curve_link_carries_the_longest_frame_that_is_allowed(end, address):
    served, dialing = (KeyPair(*zmq.curve_keypair()) for _ in range(2))
    server = end({}, bind=address, curve=Curve(served, {}, {dialing.public: "laptop"}))
    client = end({"a": address}, curve=Curve(dialing, {"a": served.public}, {}))
    end.until(lambda: client.of(LinkUp), "the link")
    longest = bytes(MAX_FRAME)
    assert client.links.send(Link("a"), [b"header", longest])
    end.until(lambda: server.frames() == [[b"header", longest]], "the frames")
    assert not client.of(LinkDown)


@pytest.mark.parametrize("revision", [None, 0, 1])
def test_connections_of_old_zmtp_are_refused_by_who_listens(end, address, revision):
    """Their messages would come without metadata, and libzmq ends the process if such a connection ends early."""
    listener = end({}, bind=address)
    greeting = b"\x01\x00" if revision is None else b"\xff" + bytes(7) + b"\x01\x7f" + bytes([revision, 5])
    rest = b"\x00\x00" if revision == 1 else b"" if revision is None else b"\x01\x00"
    message = b"\x00\x02hi" if revision == 1 else b"\x03\x00hi"
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as raw:
        raw.sendall(greeting + rest + message)
        raw.settimeout(10)
        try:
            while raw.recv(100):
                pass
        except ConnectionError:
            pass
    dialler = end({"a": address})
    end.until(lambda: dialler.of(LinkUp), "a link")
    assert dialler.links.send(Link("a"), [b"still here"])
    end.until(listener.frames, "a message")
    assert listener.frames() == [[b"still here"]]


@pytest.mark.parametrize("revision", [0, 1, 3])
def test_a_listener_of_old_zmtp_or_nonsense_is_dialed_again(end, revision):
    """libzmq gives up then, in silence: a peer that comes to listen there would never be found."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        dialler = end({"a": f"tcp://127.0.0.1:{port}"})
        for _ in range(3):
            end.until(lambda: select.select([server], [], [], 0)[0], "the next attempt")
            with server.accept()[0] as raw:
                raw.sendall(b"\xff" + bytes(7) + b"\x01\x7f" + bytes([revision, 6, 0, 0]) + b"\x00\x02hi" + bytes(60))
                end.until(lambda raw=raw: ended(raw), "its end")
    listener = end({}, bind=f"tcp://127.0.0.1:{port}")
    end.until(lambda: dialler.of(LinkUp), "a link")
    assert not dialler.frames()
    assert dialler.links.send(Link("a"), [b"found"])
    end.until(listener.frames, "a message")


def test_a_frame_that_is_too_long_for_who_dialed_ends_the_link_and_not_the_dialing(end, address):
    listener, dialler = linked(end, address)
    (incoming,) = listener.of(Incoming)
    assert listener.links.send(incoming.link, [b"x" * (MAX_FRAME + 1)])
    end.until(lambda: len(dialler.of(LinkUp)) == 2, "the link again")
    assert len(dialler.of(LinkDown)) == 1


def test_connections_that_ended_before_they_were_read_leave_nothing(end, address):
    """Descriptors of links that come and go are used again at once; nothing may pile up behind them."""
    listener = end({}, bind=address)
    for _ in range(30):
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 5000
            dealer.connect(address)
            dealer.send(b"hi")
    end.until(lambda: len(listener.frames()) == 30, "all messages")
    said = {event.link for event in listener.of(Incoming)}
    end.until(lambda: {event.link for event in listener.of(LinkDown)} == said, "all ends")
    end.until(lambda: num_incoming(listener.links) == 0, "no connection that is still kept account of")


@pytest.mark.leaks_ok("pyzmq starts one thread for good when a frame is first sent without a copy")
def test_a_slow_link_lives_while_tokens_fill_it_in_both_directions(wait_until):
    """At a megabit a second 250 KB, the tokens of a ViT between tiny and small, take twice the time that a link may be
    silent otherwise: nothing else passes meanwhile, and heartbeats of both sides wait behind more of the kind."""
    size, count = 250_000, 3
    port, front = free_ports(2)
    proxy = Proxy(front, ("127.0.0.1", port))
    process = subprocess.Popen([sys.executable, "-c", ECHO, f"tcp://127.0.0.1:{port}", str(size), str(count)])
    one = End({"a": f"tcp://127.0.0.1:{front}"}, max_frame=size, tokens_frame=size)
    try:
        wait_until(lambda: one.poll() or one.of(LinkUp), 30.0, "a link")
        proxy.conditions.rate_mbit = 1.0
        assert one.links.send(Link("a"), [b"go"])
        for _ in range(count):
            assert one.links.send(Link("a"), [b"tokens", bytes(size)])
        wait_until(lambda: one.poll() or len(one.frames()) == count or one.of(LinkDown), 60.0, "their tokens")
        assert one.links.send(Link("a"), [b"downs?"])
        wait_until(lambda: one.poll() or one.frames()[-1][0] == b"downs" or one.of(LinkDown), 60.0, "an answer")
        assert one.frames()[-1] == [b"downs", b"0"]
        assert not one.of(LinkDown)
    finally:
        one.close()
        process.kill()
        process.wait()
        proxy.close()


def test_a_connection_that_ends_while_much_of_it_is_unread_ends_no_process(end, address):
    """libzmq's heartbeats do not survive that where it stops reading at a bound."""
    process = subprocess.Popen(
        [sys.executable, "-c", LATE, address, "3000"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"listens\n"
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as raw:
            shake_hands(raw, "DEALER")
            raw.sendall(b"\x00\x05hello" * 3000)
        said, _ = process.communicate(b"read now\n", timeout=30)
        assert process.returncode == 0
        assert said == b"3000\n"
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@needs_own_network
@in_own_network
def test_a_link_to_a_port_from_which_it_is_dialed_does_not_keep_the_port(wait_until):
    """With a single port to dial from, TCP connects the socket to itself if nobody listens there."""
    Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("40000 40001")
    dialing = Links({"a": "tcp://127.0.0.1:40000"}, bind=None, heartbeat=HeartbeatSettings(), max_frame=1000)
    events = []
    wait_until(lambda: events.extend(dialing.poll(0.05)) or len(events) >= 2)
    assert {type(event) for event in events} == {NoLink}

    peers = []

    def listen():
        dialing.poll(0.05)
        with contextlib.suppress(LinkError):
            peers.append(Links({}, bind="tcp://127.0.0.1:40000", heartbeat=HeartbeatSettings(), max_frame=1000))
        return bool(peers)

    wait_until(listen)
    (peer,) = peers
    wait_until(lambda: any(isinstance(event, LinkUp) for event in [*dialing.poll(0.05), *peer.poll(0.0)]))
    dialing.close()
    peer.close()
