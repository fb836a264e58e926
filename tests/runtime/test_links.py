"""Real sockets on the loopback: links that come up, end, are killed, come back, and are sent what they cannot take."""

import signal
import socket
import struct
import subprocess
import sys

import pytest
import zmq

from ls_edge.errors import LinkError
from ls_edge.peers import HeartbeatSettings
from ls_edge.runtime.keys import KeyPair
from ls_edge.runtime.links import ZERO_COPY_FROM, Curve, Incoming, Link, LinkDown, Links, LinkUp, NoLink
from ls_edge.runtime.local import free_ports

MAX_FRAME = 200_000

DIALLER = """
import sys
from ls_edge.peers import HeartbeatSettings
from ls_edge.runtime.links import Link, Links, LinkUp

links = Links({"a": sys.argv[1]}, bind=None, heartbeat=HeartbeatSettings(), max_frame=1000)
while True:
    if any(isinstance(event, LinkUp) for event in links.poll(1.0)):
        links.send(Link("a"), [b"hello"])
"""


class End:
    """Links of one process, with what happened to them."""

    def __init__(self, dial, bind=None, **options):
        heartbeat = options.pop("heartbeat", HeartbeatSettings())
        self.links = Links(dial, bind=bind, heartbeat=heartbeat, max_frame=MAX_FRAME, **options)
        self.events = []

    def poll(self, timeout=0.005):
        self.events += self.links.poll(timeout)

    def frames(self):
        return [[frame.bytes for frame in event.frames] for event in self.events if isinstance(event, Incoming)]

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


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
        one.links.close()


def linked(end, address):
    """A process that listens and one that dialled it and said ``hi``."""
    listener, dialler = end({}, bind=address), end({"a": address})
    end.until(lambda: dialler.of(LinkUp), "a link")
    assert dialler.links.send(Link("a"), [b"hi"])
    end.until(listener.frames, "a message")
    return listener, dialler


@pytest.mark.leaks_ok("pyzmq starts one thread for good when a frame is first sent without a copy")
def test_messages_go_both_ways(end, address):
    listener, dialler = linked(end, address)
    (incoming,) = listener.of(Incoming)
    assert incoming.user == ""
    assert incoming.link.routing_id
    assert dialler.of(LinkUp) == [LinkUp(Link("a"))]
    large = bytes(range(256)) * (ZERO_COPY_FROM // 128)
    assert listener.links.send(incoming.link, [b"header", large])
    end.until(dialler.frames, "the answer")
    assert dialler.frames() == [[b"header", large]]
    assert dialler.of(Incoming)[0].link == Link("a")
    assert dialler.of(Incoming)[0].user == "a"


def test_the_end_of_a_link_is_seen_by_both_sides(end, address):
    listener, dialler = linked(end, address)
    dialler.links.close()
    end.until(lambda: listener.of(LinkDown), "the end")
    assert listener.of(LinkDown) == [LinkDown(listener.of(Incoming)[0].link, "connection lost")]
    other = end({"a": address})
    end.until(lambda: other.of(LinkUp), "a link")
    listener.links.close()
    end.until(lambda: other.of(LinkDown), "the end")
    assert other.of(LinkDown) == [LinkDown(Link("a"), "connection lost")]


def test_a_lost_link_is_dialled_again(end, address):
    listener, dialler = linked(end, address)
    listener.links.close()
    end.until(lambda: dialler.of(LinkDown), "the end")
    assert not dialler.links.send(Link("a"), [b"lost"])
    again = end({}, bind=address)
    end.until(lambda: len(dialler.of(LinkUp)) == 2, "the link again")
    assert dialler.links.send(Link("a"), [b"found"])
    end.until(again.frames, "a message")
    assert again.frames() == [[b"found"]]


def test_who_is_dialled_may_start_later(end, address):
    dialler = end({"a": address})
    for _ in range(20):
        dialler.poll()
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


def test_a_socket_that_never_says_a_word_is_no_link(end):
    """It takes connections and leaves them at that, as the kernel does for a process that is stopped."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dialler = end({"a": f"tcp://127.0.0.1:{silent.getsockname()[1]}"})
        for _ in range(20):
            dialler.poll()
        assert not dialler.events
        assert not dialler.links.send(Link("a"), [b"x"])


def test_many_links_end_one_by_one(end, address):
    """Descriptors are used again by later connections; each end has to be that of the right link."""
    listener = end({}, bind=address)
    for number in range(12):
        dialler, stays = end({"a": address}), end({"a": address})
        end.until(lambda d=dialler, s=stays: d.of(LinkUp) and s.of(LinkUp), "two links")
        dialler.links.send(Link("a"), [b"goes"])
        stays.links.send(Link("a"), [b"stays"])
        end.until(lambda n=number: len(listener.frames()) == 2 * n + 2, "two messages")
        dialler.links.close()
        end.until(lambda n=number: len(listener.of(LinkDown)) == n + 1, "one end")
    said = {event.link: event.frames[0].bytes for event in listener.of(Incoming)}
    assert [said[event.link] for event in listener.of(LinkDown)] == [b"goes"] * 12


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


def test_a_link_that_never_was_ends_once(end, address):
    listener = end({}, bind=address)
    nowhere = Link(routing_id=b"\0nope")
    assert not listener.links.send(nowhere, [b"x"])
    assert not listener.links.send(nowhere, [b"y"])
    listener.poll()
    listener.poll()
    assert listener.events == [LinkDown(nowhere, "connection lost")]


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
    with pytest.raises(LinkError, match=f"{address} is in use; stop what listens there"):
        Links({}, bind=address, heartbeat=HeartbeatSettings(), max_frame=MAX_FRAME)


def test_an_address_of_another_machine_is_said():
    with pytest.raises(LinkError, match=r"cannot listen on tcp://192\.0\.2\.1:5555: .*; 'bind' in peers.yaml must be"):
        Links({}, bind="tcp://192.0.2.1:5555", heartbeat=HeartbeatSettings(), max_frame=MAX_FRAME)


def test_a_queue_that_is_full_is_said_and_not_waited_for(end, address):
    listener, dialler = linked(end, address)
    sent = 0
    while sent < 100_000 and dialler.links.send(Link("a"), [b"x" * 10_000]):
        sent += 1
    assert 0 < sent < 100_000
    before = len(listener.frames())
    end.until(lambda: len(listener.frames()) == before + sent, "all that was taken")
    assert dialler.links.send(Link("a"), [b"x"])


def test_another_thread_wakes_the_poll(end, address):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        one = end({}, bind=address)
        one.links.register(ours.fileno())
        theirs.send(b"x")
        one.poll(60.0)  # returns at once, or the test runs into its time limit
        assert not one.events


@pytest.mark.skipif(not zmq.has("curve"), reason="libzmq was built without CURVE")
def test_a_curve_link_carries_the_longest_frame_that_is_allowed(end, address):
    served, dialling = (KeyPair(*zmq.curve_keypair()) for _ in range(2))
    server = end({}, bind=address, curve=Curve(served, {}, {dialling.public: "laptop"}))
    client = end({"a": address}, curve=Curve(dialling, {"a": served.public}, {}))
    end.until(lambda: client.of(LinkUp), "the link")
    longest = bytes(MAX_FRAME)
    assert client.links.send(Link("a"), [b"header", longest])
    end.until(lambda: server.frames() == [[b"header", longest]], "the frames")
    assert not client.of(LinkDown)
