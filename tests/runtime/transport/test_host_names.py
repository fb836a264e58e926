"""Host names with several, slow and changing addresses, asked of a real name server in a network of the test's own."""

import socket
import time
from pathlib import Path

import pytest

from ls_edge.core.peers_file import HeartbeatSettings, load_peers
from ls_edge.runtime.clients.session import Client
from ls_edge.runtime.protocol import framing
from ls_edge.runtime.protocol.messages import State, Welcome
from ls_edge.runtime.transport.connections import Incoming, LinkUp, NoLink
from ls_edge.runtime.transport.links import Links
from tests.faults.own_network import NameServer, in_own_network, needs_own_network

pytestmark = needs_own_network
PORT = 5555
HEARTBEAT = HeartbeatSettings()
WARM = State(True, False, False, 0, 0, 0, 0)


def listening(host):
    """A process that listens at an address."""
    return Links({}, bind=f"tcp://{host}:{PORT}", heartbeat=HEARTBEAT, max_frame=1000)


def dialing(*names):
    """A process that dials NAME.lan."""
    return Links({name: f"tcp://{name}.lan:{PORT}" for name in names}, bind=None, heartbeat=HEARTBEAT, max_frame=1000)


def wait_for(links, is_it, *others):
    """Poll until an event is the wanted one, and return the events up to it."""
    events, end = [], time.monotonic() + 20
    while time.monotonic() < end:
        for event in links.poll(0.05):
            events.append(event)
            if is_it(event):
                return events
        for other in others:
            other.poll(0.0)
    raise AssertionError(events)


def is_up(event):
    return isinstance(event, LinkUp)


@pytest.mark.parametrize("other", ["127.0.0.2", "10.99.0.1", "127.0.0.9"], ids=["refuses", "drops", "is no peer"])
@pytest.mark.parametrize("works", ["127.0.0.3", "[::1]"])
@pytest.mark.parametrize("first", [True, False])
@in_own_network
def test_a_peer_is_reached_at_whichever_of_its_addresses_works(other, works, first):
    found = [other, works.strip("[]")]
    with socket.create_server(("127.0.0.9", PORT)), NameServer(orin=found if first else found[::-1]):
        peer, source = listening(works), dialing("orin")
        wait_for(source, is_up, peer)
        source.close()
        peer.close()


@in_own_network
def test_a_slow_name_delays_only_itself():
    with NameServer(slow=["127.0.0.4"], orin=["127.0.0.2"]) as server:
        server.delays["slow"] = 60.0
        peer, source = listening("127.0.0.2"), dialing("slow", "orin")
        events = wait_for(source, is_up, peer)
        assert events[-1].link.dialed == "orin"
        peer.close()
        server.addresses["orin"] = ["127.0.0.3"]
        peer = listening("127.0.0.3")
        assert wait_for(source, is_up, peer)[-1].link.dialed == "orin"
        source.close()
        peer.close()


@in_own_network
def test_a_name_with_only_link_local_addresses_is_named():
    with NameServer(orin=["fe80::1"]):
        source = dialing("orin")
        (event,) = wait_for(source, lambda event: isinstance(event, NoLink))
        assert event.why == (
            "host name 'orin.lan' has only link-local addresses, which need an interface; use another address"
        )
        source.close()


@pytest.mark.parametrize(
    ("host", "fault"),
    [
        ("fe80::1%wlan9", "and this machine has no interface wlan9, only lo, "),
        ("FE80::1", "without an interface; use an address that is the same on all machines"),
    ],
)
@in_own_network
def test_a_link_local_address_of_another_machine_is_named(host, fault):
    """libzmq tried it again and again without an event."""
    source = Links({"orin": f"tcp://[{host}]:{PORT}"}, bind=None, heartbeat=HEARTBEAT, max_frame=1000)
    (event,) = wait_for(source, lambda event: isinstance(event, NoLink))
    assert event.why.startswith(f"tcp://[{host}]:{PORT} is a link-local address {fault}")
    source.close()


@in_own_network
def test_the_name_of_a_peer_whose_address_another_process_has_is_looked_up_again(write_peers):
    """Also status and push look again; a source does so in its handshake."""

    def answer(listener, name):
        for event in listener.poll(0.0):
            if isinstance(event, Incoming):
                for message in (Welcome(name, "peer", 1, 0, "model", "bundle", (0, 1)), WARM):
                    listener.send(event.link, [framing.encode(message)])

    peers = load_peers(write_peers({"orin": [0, 1]}, address=f"tcp://orin.lan:{PORT}", top={"insecure": True}))
    with NameServer(orin=["127.0.0.2"]) as server, Client(peers, None, "laptop", "observer") as client:
        other, orin = listening("127.0.0.2"), listening("127.0.0.3")

        def welcomed_by(name):
            answer(other, "other")
            answer(orin, "orin")
            session = client.sessions["orin"]
            return session.state is not None and session.welcome.name == name

        assert client.wait_until(lambda: welcomed_by("other"), 20)
        assert "is 'other'; correct the addresses" in client.sessions["orin"].judge()[1]
        server.addresses["orin"] = ["127.0.0.3"]
        assert client.wait_until(lambda: welcomed_by("orin"), 20)
        other.close()
        orin.close()


@in_own_network
def test_a_peer_that_listens_on_the_loopback_by_its_name_says_so(caplog):
    """As on Debian, whose installer writes this line."""
    Path("/etc/hosts").write_text("127.0.1.1 orin.lan\n")
    listening("orin.lan").close()
    (record,) = caplog.records
    assert record.getMessage() == "listening on the loopback only"
    assert record.why.startswith("tcp://orin.lan:5555 is tcp://127.0.1.1:5555 here, which others cannot reach")
