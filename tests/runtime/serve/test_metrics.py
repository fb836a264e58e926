"""What Prometheus reads of peers and sources, and HTTP clients that mean no good, while images are answered."""

import contextlib
import http.client
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from concurrent.futures import wait
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import LinkError, UsageError
from ls_edge.core.peers_file import load_peers
from ls_edge.device.sensors import Sensors
from ls_edge.runtime.fleet.local_cluster import LocalCluster
from ls_edge.runtime.peer.counts import PeerSnapshot
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.protocol import framing
from ls_edge.runtime.protocol import messages as wire
from ls_edge.runtime.routing.state.events import Note, NoteKind, Tick
from ls_edge.runtime.serve.http.access import Access
from ls_edge.runtime.serve.http.listener import MAX_SCRAPE_CONNECTIONS, open_listener, parse_address
from ls_edge.runtime.serve.http.router import Router
from ls_edge.runtime.serve.metrics import DeviceCollector, PeerCollector, SourceCollector, registry_of
from ls_edge.runtime.serve.scrape_server import ScrapeServer
from ls_edge.runtime.serve.service import Service
from ls_edge.runtime.source.source import Source
from ls_edge.runtime.transport.node import MachineDriver
from ls_edge.runtime.transport.outbox import LinkCounts, Outbox
from ls_edge.version import __version__

PLACEMENT = {"a": range(6), "b": range(6)}
COUNT = 20


@contextlib.contextmanager
def listening(collector):
    """A listener for metrics; yields its address."""
    with ScrapeServer(open_listener("127.0.0.1:0", "--metrics"), registry_of(collector)) as server:
        yield server.url.removesuffix("/metrics")


def scrape(url):
    """Every sample: ``{"name{a=b}": value}``."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain; version=")
        text = reply.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            assert re.match("ls_edge_|process_", sample.name), sample.name
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def buckets(samples, name):
    found = [(key, value) for key, value in samples.items() if key.startswith(f"{name}_bucket")]
    assert found[-1][0].endswith("{le=+Inf}")
    return [value for _, value in found]


@pytest.fixture
def file(write_peers):
    return load_peers(write_peers(PLACEMENT))


@pytest.fixture
def peers(file, tiny_bundle, serve):
    return {name: serve(Peer(file, name, Bundle.open(tiny_bundle))) for name in PLACEMENT}


def test_figures_are_those_of_what_was_answered(file, peers, tiny_bundle, images, wait_until):
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(Source.open(file, tiny_bundle, policy="fastest"))
        of_source = stack.enter_context(listening(SourceCollector(source)))
        each = [
            stack.enter_context(listening(PeerCollector(lambda: file, lambda p=p: p.snapshot))) for p in peers.values()
        ]
        assert source.wait_ready(10) == ()
        answers = [source.submit(image).result(10) for image in images(COUNT)]
        found = scrape(of_source)
        assert found["ls_edge_source_requests_submitted_total"] == COUNT
        assert found["ls_edge_source_answers_total"] == COUNT
        assert found["ls_edge_source_latency_seconds_count"] == COUNT
        total = sum(answer.record.latency_us for answer in answers) / 1e6
        assert found["ls_edge_source_latency_seconds_sum"] == pytest.approx(total)
        counts = buckets(found, "ls_edge_source_latency_seconds")
        assert counts == sorted(counts)
        assert counts[-1] == COUNT
        assert counts[3] == sum(answer.record.latency_us <= 50_000 for answer in answers)
        assert found["ls_edge_source_requests_in_flight"] == found["ls_edge_source_missing_blocks"] == 0
        assert found["ls_edge_source_peers_alive"] == 2
        assert found["ls_edge_neighbor_up{peer=a}"] == found["ls_edge_neighbor_up{peer=b}"] == 1
        bundle_id = Bundle.open(tiny_bundle).manifest.bundle_id
        assert found[f"ls_edge_build_info{{bundle_id={bundle_id},name=,role=source,version={__version__}}}"] == 1
        assert found["process_resident_memory_bytes"] > 1e6

        of_peers = [scrape(url) for url in each]
        assert sum(one["ls_edge_peer_blocks_run_total"] for one in of_peers) == 6 * COUNT
        visits = [visit for answer in answers for visit in answer.record.visits]
        engine_s = sum(visit.engine_us for visit in visits) / 1e6
        assert sum(one["ls_edge_peer_engine_call_seconds_sum"] for one in of_peers) == pytest.approx(engine_s)
        for name, one in zip(peers, of_peers, strict=True):
            by_block = [value for key, value in one.items() if "engine_seconds_total{block=" in key]
            assert len(by_block) == 6
            assert sum(by_block) == pytest.approx(one["ls_edge_peer_engine_call_seconds_sum"])
            calls = buckets(one, "ls_edge_peer_engine_call_seconds")
            assert (
                calls[-1] == one["ls_edge_peer_engine_call_seconds_count"] == one["ls_edge_peer_engine_requests_total"]
            )
            assert (one["ls_edge_peer_warm"], one["ls_edge_peer_engine_stuck"]) == (1, 0)
            assert one["ls_edge_peer_linked_processes"] == 2
            assert one["ls_edge_peer_credits"] > 0
            (other,) = PLACEMENT.keys() - {name}
            assert {key for key in one if "neighbor_up" in key} == {f"ls_edge_neighbor_up{{peer={other}}}"}

        # What one side sends as tokens, the others receive.
        tokens = "ls_edge_link_bytes_total{{codec=raw,direction={}}}"
        everywhere = [scrape(of_source), *of_peers]
        moved = [sum(one[tokens.format(direction)] for one in everywhere) for direction in ("sent", "received")]
        manifest = Bundle.open(tiny_bundle).manifest
        assert moved[0] == moved[1] >= 2 * COUNT * manifest.tokens.bytes_per_image
        others = "ls_edge_link_bytes_total{{codec=none,direction={}}}"

        def lost():
            found = [scrape(of_source), *map(scrape, each)]
            return sum(one[others.format("sent")] - one[others.format("received")] for one in found)

        wait_until(lambda: lost() == 0, what="other messages to arrive")
        assert all(one[others.format("sent")] > 0 for one in everywhere)
        assert all(one["ls_edge_link_bytes_total{codec=fp16,direction=sent}"] == 0 for one in everywhere)
        assert {key for key in everywhere[0] if "suspicions" in key} == {
            f"ls_edge_suspicions_total{{peer={name}}}" for name in PLACEMENT
        }
        assert everywhere[0]["ls_edge_reroutes_total"] == 0

        peers["b"].stop()
        wait_until(lambda: scrape(each[0])["ls_edge_neighbor_up{peer=b}"] == 0)
        wait_until(lambda: scrape(of_source)["ls_edge_source_peers_alive"] == 1)
        assert scrape(of_source)["ls_edge_neighbor_up{peer=b}"] == 0


def test_errors_and_canceled_requests_are_counted(file, tiny_bundle, images):
    with (
        Source.open(file, tiny_bundle, max_skips=0, budget_ms=100) as source,
        listening(SourceCollector(source)) as url,
    ):
        futures = [source.submit(image, budget_ms=60_000 if cancel else None)
                   for image, cancel in zip(images(3), (False, False, True), strict=True)]  # fmt: skip
        wait(futures[:2], 10)
        assert scrape(url)["ls_edge_source_requests_in_flight"] == 1
        assert futures[2].cancel()
        wait(futures, 10)
        end = time.monotonic() + 5
        while source.counts.in_flight and time.monotonic() < end:
            time.sleep(0.01)
        found = scrape(url)
        failed = {key: value for key, value in found.items() if key.startswith("ls_edge_source_failed_requests_total")}
        names = {type(future.exception()).__name__ for future in futures[:2]}
        assert {key for key, value in failed.items() if value} == {
            f"ls_edge_source_failed_requests_total{{error={name}}}" for name in names
        }
        assert sum(failed.values()) == 2
        assert found["ls_edge_source_canceled_requests_total"] == 1
        assert found["ls_edge_source_requests_in_flight"] == found["ls_edge_source_answers_total"] == 0
        assert found["ls_edge_source_missing_blocks"] == 6


def test_messages_of_strangers_are_counted_by_constant_reasons(file, peers, wait_until):
    import zmq

    context = zmq.Context()
    try:
        with (
            listening(PeerCollector(lambda: file, lambda: peers["a"].snapshot)) as url,
            context.socket(zmq.DEALER) as dealer,
        ):
            dealer.linger = 0
            dealer.connect(file.peer("a").address)
            for number in range(5):
                dealer.send(b"no message %d" % number)
            dealer.send(framing.encode(wire.Bye("<b>")))
            wait_until(lambda: scrape(url)["ls_edge_dropped_messages_total{reason=malformed}"] == 5)
            wait_until(lambda: scrape(url)["ls_edge_dropped_messages_total{reason=before_hello}"] == 1)
            reasons = {key for key in scrape(url) if "dropped_messages" in key}
            assert reasons == {
                f"ls_edge_dropped_messages_total{{reason={reason}}}"
                for reason in ("malformed", "before_hello", "hello_refused", "unsendable")
            }
    finally:
        context.term()


def test_suspicions_are_counted_for_the_peers_of_the_file():
    class Machine:
        def handle_all(self, events, now):
            return [Note(NoteKind.SUSPECT, "a"), Note(NoteKind.LOST, "a"), Note(NoteKind.SUSPECT, "a source")]

    counts = LinkCounts(["a", "b"])
    outbox = Outbox("c", None, {}, counts)
    MachineDriver(Machine(), outbox, print, Counter(), counts.suspicions).feed(Tick())
    assert counts.suspicions == {"a": 1, "b": 0}


def test_a_peer_that_waits_for_a_bundle(write_peers, serve, tmp_path, wait_until):
    import zmq

    from ls_edge.runtime.transport.keys import KeyPair

    keys = {name: KeyPair(*zmq.curve_keypair()) for name in ("a", "laptop")}
    path = write_peers({"a": range(6)}, keys=keys, sources=["laptop"])
    path.write_text(path.read_text().replace("- name: laptop\n", "- name: laptop\n  may_push: true\n"))
    file = load_peers(path)
    peer = Peer(file, "a", store=tmp_path / "store", keys=keys["a"])
    assert not peer.snapshot.warm
    serve(peer)
    with listening(PeerCollector(lambda: file, lambda: peer.snapshot)) as url:
        found = scrape(url)
        assert found["ls_edge_peer_warm"] == found["ls_edge_peer_blocks_run_total"] == 0
        assert f"ls_edge_build_info{{bundle_id=,name=a,role=peer,version={__version__}}}" in found


def test_each_figure_is_documented_and_no_other(file, tiny_bundle):
    text = (Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
    with Source.open(file, tiny_bundle) as source, contextlib.closing(Service(source, holder_wait_s=0, queue=0)) as one:
        Router([], Access(loopback_only=True), one.registry, access_log=False)
        families = [
            *(family for family in one.registry.collect() if family.name.startswith("ls_edge")),
            *PeerCollector(lambda: file, lambda: PeerSnapshot("a")).collect(),
            *DeviceCollector(Sensors()).collect(),
        ]
    names = {family.name + {"counter": "_total", "info": "_info"}.get(family.type, "") for family in families}
    assert len(names) > 20
    for name in names:
        short = re.sub("^ls_edge_(peer|source|http)", "", name)
        assert re.search(rf"`({name}|{short})[`{{]", text), name
    assert set(re.findall(r"ls_edge_\w+", text)) <= names


def connect(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def ended(connection, within):
    """Whether the other side closes a connection in time; what it still sends is read."""
    connection.settimeout(within)
    with contextlib.suppress(ConnectionError):
        while connection.recv(65536):
            pass
    return True


def test_hostile_clients_cost_the_peer_nothing(file, peers, tiny_bundle, images, monkeypatch):
    monkeypatch.setattr("ls_edge.runtime.serve.scrape_server._Handler.timeout", 0.5)
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(Source.open(file, tiny_bundle))
        url = stack.enter_context(listening(PeerCollector(lambda: file, lambda: peers["a"].snapshot)))
        assert source.wait_ready(10) == ()
        futures = [source.submit(image, budget_ms=10_000) for image in images(COUNT)]
        slow = [stack.enter_context(connect(url)) for _ in range(2 * MAX_SCRAPE_CONNECTIONS)]
        for connection in slow[: MAX_SCRAPE_CONNECTIONS // 2]:
            with contextlib.suppress(OSError):
                connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: ")
        assert all(ended(connection, 20) for connection in slow)
        for garbage in (
            b"\x00\xff" * 500 + b"\r\n\r\n",
            b"GET /metrics HTTP/9.9\r\n\r\n",
            b"GET http://[/ HTTP/1.1\r\nHost: x\r\n\r\n",
            b"POST /metrics HTTP/1.1\r\nContent-Length: " + b"9" * 6000 + b"\r\n\r\n",
            b"GET /metrics HTTP/1.1\r\nX: " + b"y" * 100_000,
            b"POST /metrics HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        ):
            with connect(url) as connection, contextlib.suppress(ConnectionError):
                connection.sendall(garbage)
                assert ended(connection, 10)
        assert scrape(url)["ls_edge_peer_warm"] == 1
        assert all(future.result(10).prediction >= 0 for future in futures)


def test_nothing_can_be_changed(file, capfd):
    with listening(PeerCollector(lambda: file, lambda: PeerSnapshot("a"))) as url:
        for method, path, status in (
            ("POST", "/metrics", 405), ("DELETE", "/metrics", 405), ("GET", "/metrics", 200),
            ("GET", "/metrics?name[]=x", 200),
        ):  # fmt: skip
            connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
            connection.request(method, path)
            assert connection.getresponse().status == status, (method, path)
            connection.close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:0", "127.0.0.1", 0), ("[::1]:9100", "::1", 9100), ("localhost:65535", "localhost", 65535)],
)
def test_addresses(text, host, port):
    assert parse_address(text, "--metrics") == (host, port)


@pytest.mark.parametrize(
    "text",
    ["", "9100", ":9100", "127.0.0.1", "127.0.0.1:", "127.0.0.1:-1", "127.0.0.1:65536", "127.0.0.1:٣", "::1:9100",
     "[::1]", "[127.0.0.1]:1", "http://127.0.0.1:80", "a b:1", "[:]:1", "127.0.0.1:80/x"],
)  # fmt: skip
def test_addresses_that_are_none(text):
    with pytest.raises(UsageError, match=r"^--metrics .* is not HOST:PORT"):
        open_listener(text, "--metrics")


def test_addresses_that_cannot_be_listened_on():
    with (
        open_listener("127.0.0.1:0", "--metrics") as taken,
        pytest.raises(LinkError, match=r"^--metrics 127.0.0.1:\d+: cannot listen \(Address already in use\)"),
    ):
        open_listener(f"127.0.0.1:{taken.getsockname()[1]}", "--metrics")
    with pytest.raises(UsageError, match=r"no-such-host\.invalid is not found"):
        open_listener("no-such-host.invalid:1", "--metrics")
    with pytest.raises(LinkError, match="cannot listen"):
        open_listener("192.0.2.1:0", "--metrics")


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_ipv6(file):
    try:
        listener = open_listener("[::1]:0", "--metrics")
    except LinkError:
        pytest.skip("no IPv6 loopback here")
    with ScrapeServer(listener, registry_of(PeerCollector(lambda: file, lambda: PeerSnapshot("a")))) as server:
        assert server.url.startswith("http://[::1]:")
        assert scrape(server.url.removesuffix("/metrics"))["ls_edge_peer_warm"] == 0


def test_processes_offer_figures_and_end_as_without(tmp_path, tiny_bundle):
    everywhere = ["--metrics", "127.0.0.1:0"]
    with LocalCluster(tmp_path, tiny_bundle, PLACEMENT, arguments=everywhere) as cluster:
        cluster.wait_warm()
        url = re.search(r"url=(http://\S+)/metrics", cluster.log_path("a").read_text())[1]
        assert scrape(url)["ls_edge_peer_warm"] == 1
        command = [sys.executable, "-m", "ls_edge", "run", "--peers", cluster.path, "--bundle", tiny_bundle, "--data",
                   "digits", "--limit", "600", "--json", *everywhere]  # fmt: skip
        with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
            line = run.stderr.readline()
            of_run = re.fullmatch(r"ls-edge: metrics at (http://\S+)/metrics\n", line)[1]
            connect(of_run).close()
            with connect(of_run) as half:
                half.sendall(b"GET /met")
                found = scrape(of_run)
                assert found["ls_edge_source_peers_alive"] <= 2
                assert run.wait(60) == 0
            assert scrape(url)["ls_edge_peer_blocks_run_total"] > 0
        with connect(url) as half:
            half.sendall(b"GET /met")
            cluster.signal("a", signal.SIGTERM)
            assert cluster.processes["a"].wait(10) == 0
            assert ended(half, 1)


def test_without_the_extra_one_line_names_it(file, tiny_bundle):
    code = "import sys; sys.modules['prometheus_client'] = None; from ls_edge.__main__ import main; main()"
    given = ["--peers", file.path, "--name", "a", "--bundle", tiny_bundle]
    done = subprocess.run(
        [sys.executable, "-c", code, "peer", *given, "--metrics", "127.0.0.1:0"], capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert re.fullmatch(
        r"ls-edge: --metrics needs prometheus_client \(extra metrics\); to install: pip install .*prometheus-client.*\n",  # noqa: E501
        done.stderr,
    )
