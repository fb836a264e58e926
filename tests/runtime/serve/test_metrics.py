"""What Prometheus reads of peers and sources, and HTTP clients that mean no good, while images are answered."""

import contextlib
import re
import signal
import socket
import struct
import subprocess
import sys
import urllib.request
from concurrent.futures import wait
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ls_edge.cli import metrics_listener
from ls_edge.cli.metrics_listener import metrics_port
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import LinkError, UsageError
from ls_edge.core.peers_file import load_peers
from ls_edge.device.sensors import Sensors
from ls_edge.runtime.fleet.local_cluster import LocalCluster
from ls_edge.runtime.peer.counts import PeerSnapshot
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.serve.access import Access
from ls_edge.runtime.serve.listener import open_listener, parse_address
from ls_edge.runtime.serve.metrics import DeviceCollector, PeerCollector, SourceCollector
from ls_edge.runtime.serve.middleware import Middleware
from ls_edge.runtime.serve.service import Service
from ls_edge.runtime.source.source import Source
from ls_edge.version import __version__

PLACEMENT = {"a": range(6), "b": range(6)}
COUNT = 20


@contextlib.contextmanager
def listening(collector, address="127.0.0.1:0"):
    """A listener for metrics; yields its address."""
    with metrics_port(address) as serve:
        yield serve(collector).removesuffix("/metrics")


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
        wait_until(
            lambda: {(one.state, len(one.reaches)) for one in source.snapshot.peers.values()} == {("alive", 2)}, 30.0
        )
        answers = [source.submit(image).result(10) for image in images(COUNT)]
        found = scrape(of_source)
        names = ("requests_submitted_total", "answers_total", "latency_seconds_count")
        assert {found[f"ls_edge_source_{name}"] for name in names} == {COUNT}
        total = sum(answer.record.latency_us for answer in answers) / 1e6
        assert found["ls_edge_source_latency_seconds_sum"] == pytest.approx(total)
        counts = buckets(found, "ls_edge_source_latency_seconds")
        assert counts == sorted(counts)
        assert (counts[3], counts[-1]) == (sum(answer.record.latency_us <= 50_000 for answer in answers), COUNT)
        assert found["ls_edge_source_requests_in_flight"] == found["ls_edge_source_missing_blocks"] == 0
        assert found["ls_edge_source_peers_alive"] == 2
        assert found["ls_edge_neighbor_up{peer=a}"] == found["ls_edge_neighbor_up{peer=b}"] == 1
        manifest = Bundle.open(tiny_bundle).manifest
        assert (
            found[f"ls_edge_build_info{{bundle_id={manifest.bundle_id},name=,role=source,version={__version__}}}"] == 1
        )
        assert found["process_resident_memory_bytes"] > 1e6

        of_peers = [scrape(url) for url in each]
        assert sum(one["ls_edge_peer_blocks_run_total"] for one in of_peers) == 6 * COUNT
        engine_s = sum(visit.engine_us for answer in answers for visit in answer.record.visits) / 1e6
        assert sum(one["ls_edge_peer_engine_call_seconds_sum"] for one in of_peers) == pytest.approx(engine_s)
        for name, one in zip(peers, of_peers, strict=True):
            by_block = [value for key, value in one.items() if "engine_seconds_total{block=" in key]
            assert (len(by_block), sum(by_block)) == (6, pytest.approx(one["ls_edge_peer_engine_call_seconds_sum"]))
            calls = {one[f"ls_edge_peer_engine_{kind}"] for kind in ("call_seconds_count", "requests_total")}
            assert calls == {buckets(one, "ls_edge_peer_engine_call_seconds")[-1]}
            states = ("warm", "engine_stuck", "linked_processes")
            assert [one[f"ls_edge_peer_{state}"] for state in states] == [1, 0, 2]
            assert one["ls_edge_peer_credits"] > 0
            others = {f"ls_edge_neighbor_up{{peer={other}}}" for other in PLACEMENT.keys() - {name}}
            assert {key for key in one if "neighbor_up" in key} == others

        # What one side sends as tokens, the others receive.
        tokens = "ls_edge_link_bytes_total{{codec=raw,direction={}}}"
        everywhere = [scrape(of_source), *of_peers]
        sent, received = (sum(one[tokens.format(way)] for one in everywhere) for way in ("sent", "received"))
        assert sent == received >= 2 * COUNT * manifest.tokens.bytes_per_image
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
        wait_until(lambda: scrape(of_source)["ls_edge_neighbor_up{peer=b}"] == 0)
        assert scrape(of_source)["ls_edge_source_peers_alive"] == 1


def test_errors_and_canceled_requests_are_counted(file, tiny_bundle, images, wait_until):
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
        wait_until(lambda: not source.counts.in_flight)
        found = scrape(url)
        failed = {key: value for key, value in found.items() if key.startswith("ls_edge_source_failed_requests_total")}
        names = {type(future.exception()).__name__ for future in futures[:2]}
        assert {key for key, value in failed.items() if value} == {
            f"ls_edge_source_failed_requests_total{{error={name}}}" for name in names
        }
        assert (sum(failed.values()), found["ls_edge_source_canceled_requests_total"]) == (2, 1)
        assert found["ls_edge_source_requests_in_flight"] == found["ls_edge_source_answers_total"] == 0
        assert found["ls_edge_source_missing_blocks"] == 6


def test_documented_figures_exist(file, tiny_bundle):
    text = (Path(__file__).parents[3] / "docs" / "operate.md").read_text(encoding="utf-8")
    with Source.open(file, tiny_bundle) as source, contextlib.closing(Service(source, holder_wait_s=0, queue=0)) as one:
        Middleware(Access(loopback_only=True), one.registry)
        families = [
            *(family for family in one.registry.collect() if family.name.startswith("ls_edge")),
            *PeerCollector(lambda: file, lambda: PeerSnapshot("a")).collect(),
            *DeviceCollector(Sensors()).collect(),
        ]
    assert not [one.samples for one in families if one.name == "ls_edge_neighbor_up"][1]  # without a bundle
    names = {family.name + {"counter": "_total", "info": "_info"}.get(family.type, "") for family in families}
    rows = [re.findall(r"`(\w+)[`{]", row) for row in re.findall(r"^\| (`ls_edge_.*?) \|", text, re.M)]
    room = re.compile(r"ls_edge_[a-z]+")  # which is left out of the further names of a row
    assert {name if name[0] == "l" else room.match(row[0])[0] + name for row in rows for name in row} == names


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
            assert scrape(of_run)["ls_edge_source_peers_alive"] <= 2
            assert run.wait(60) == 0
        assert scrape(url)["ls_edge_peer_blocks_run_total"] > 0
        cluster.signal("a", signal.SIGTERM)
        assert cluster.processes["a"].wait(10) == 0


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        *((text, UsageError, "is not HOST:PORT") for text in ("", "9100", ":9100", "127.0.0.1:65536", "127.0.0.1:٣",
          "::1:9100", "[127.0.0.1]:1", "http://127.0.0.1:80", "127.0.0.1:80/x")),
        *((text, UsageError, "is not found") for text in ("no-such-host.invalid:1", "no..host:1")),
        ("192.0.2.1:0", LinkError, "cannot listen"),
    ],
)  # fmt: skip
def test_addresses_that_cannot_be_used(file, text, error, words):
    for flag, listen in (("--http", lambda: open_listener(text, "--http")), ("--metrics", lambda: metrics(text))):
        with pytest.raises(error, match=f"^{flag} .*{words}"):
            listen()


def metrics(text):
    with metrics_port(text):
        pass


def test_clients_that_break_their_connections_or_leave_them_open(monkeypatch, capsys):
    monkeypatch.setattr(metrics_listener, "CLIENT_S", 0.2)
    with listening(DeviceCollector(Sensors())) as url:
        address = urlsplit(url).hostname, urlsplit(url).port
        with socket.create_connection(address) as broken:
            broken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with socket.create_connection(address, timeout=10) as silent:
            assert silent.recv(1) == b""
    assert capsys.readouterr().err == ""


def test_addresses():
    found = [parse_address(text, "--http") for text in ("[::1]:9100", "localhost:65535")]
    assert found == [("::1", 9100), ("localhost", 65535)]
    with open_listener("127.0.0.1:0", "--http") as taken, pytest.raises(LinkError, match=r"\(Address already in use\)"):
        metrics(f"127.0.0.1:{taken.getsockname()[1]}")


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
