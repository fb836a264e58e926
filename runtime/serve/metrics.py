"""Prometheus metrics of a peer or source.

They are computed on request from counts and snapshots that the process keeps in any case, and from the sensors of the
device. Label values come from ``peers.yaml``, this package, the bundle and the kernel, never from the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ls_edge.core.parts import ENDS
from ls_edge.core.peer_reports import PeerState
from ls_edge.core.peers_file import PeersFile
from ls_edge.device.sensors import Sensors
from ls_edge.runtime.peer.counts import Durations, PeerSnapshot
from ls_edge.runtime.source.source import Source
from ls_edge.runtime.transport.outbox import LinkCounts
from ls_edge.version import __version__

_REASONS = ("malformed", "before hello", "hello refused", "unsendable")
"""Exported reasons of dropped messages, of :attr:`ls_edge.runtime.transport.node.Node.counts`."""


class PeerCollector(Collector):
    """Metrics of a peer."""

    def __init__(self, peers: Callable[[], PeersFile], snapshot: Callable[[], PeerSnapshot]) -> None:
        """``peers`` returns the file that names its neighbors."""
        self._peers = peers
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        peer = self._snapshot()
        # A process without a bundle, such as a removed peer, has no links: the others are not unreachable.
        listed = [one.name for one in self._peers().peers if peer.bundle_id]
        yield _build("peer", peer.name, peer.bundle_id)
        for name, text, value in (
            ("warm", "1 if the engines are loaded and requests are accepted.", peer.warm),
            ("engine_stuck", "1 if an engine call has exceeded its deadline.", peer.stuck),
            ("held_requests", "Requests held, including copies kept until the next holder confirms.", peer.held),
            ("queue_length", "Requests that wait for the engine or are in it.", peer.queue),
            ("credits", "Further requests that the peer accepts now.", peer.credits),
            ("failed_blocks", "Blocks that no longer run because their engine failed.", peer.failed_blocks),
            ("linked_processes", "Linked processes, including sources.", len(peer.linked)),
        ):
            yield GaugeMetricFamily(f"ls_edge_peer_{name}", text, value=float(value))
        yield _neighbors(((name, name in peer.linked) for name in listed if name != peer.name), "has a link to")
        engine = peer.engine
        yield CounterMetricFamily(
            "ls_edge_peer_engine_requests", "Requests in engine calls, counted in each call.", value=engine.requests
        )
        yield CounterMetricFamily(
            "ls_edge_peer_blocks_run", "Blocks that the engine ran, counted for each request.", value=engine.blocks
        )
        yield _histogram("ls_edge_peer_engine_call_seconds", "Time of successful engine calls.", engine.calls)
        by_block = {ENDS.get(block, str(block)): microseconds / 1e6 for block, microseconds in engine.block_us.items()}
        text = "Engine time by block; calls of several blocks are divided equally."
        yield _by_label(CounterMetricFamily("ls_edge_peer_engine_seconds", text, labels=["block"]), by_block)
        yield from _links(peer.links, peer.reroutes)
        yield from _dropped(peer.dropped)


class SourceCollector(Collector):
    """Metrics of a source."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        source = self._source
        counts, snapshot = source.counts, source.snapshot
        listed = (
            source.name if source.peers.source(source.name) is not None else ""
        )  # otherwise it is random at each start
        yield _build("source", listed, source.bundle.manifest.bundle_id)
        for name, text, value in (
            ("requests_submitted", "Submitted images.", counts.submitted),
            ("answers", "Answered requests.", counts.answered),
            ("degraded_answers", "Answers with skipped blocks.", counts.degraded),
            ("canceled_requests", "Canceled requests.", counts.canceled),
            ("retries", "Repeated attempts, of requests that have ended.", counts.retries),
            ("duplicates_dropped", "Answers after their request had ended, dropped.", snapshot.late_answers),
            (
                "rejected_answers",
                "Answers that contradict the request, dropped.",
                sum(one.count for one in snapshot.rejected.values()),
            ),
        ):
            yield CounterMetricFamily(f"ls_edge_source_{name}", text, value=value)
        text = "Requests that ended with an error, by class."
        yield _by_label(CounterMetricFamily("ls_edge_source_failed_requests", text, labels=["error"]), counts.failed)
        alive = {name: view.state is PeerState.ALIVE for name, view in snapshot.peers.items()}
        for name, text, value in (
            ("requests_in_flight", "Requests in progress.", counts.in_flight),
            ("peers_alive", "Usable peers.", sum(alive.values())),
            ("missing_blocks", "Blocks without a warm holder.", len(snapshot.missing_blocks)),
        ):
            yield GaugeMetricFamily(f"ls_edge_source_{name}", text, value=value)
        yield _neighbors(alive.items(), "can use")
        yield _histogram("ls_edge_source_latency_seconds", "Time from submission to answer.", counts.latency)
        yield from _links(source.link_counts, snapshot.reroutes)
        yield from _dropped(snapshot.dropped)


class DeviceCollector(Collector):
    """Power, energy, temperatures and throttling of a device that has sensors for them."""

    def __init__(self, sensors: Sensors) -> None:
        """Read ``sensors`` on request."""
        self._sensors = sensors

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for which the device has sensors."""
        sensors = self._sensors
        state = sensors.state()
        joules = {name: microjoules / 1e6 for name, (microjoules, _) in sensors.energy_uj().items()}
        joules |= {f"gpu{place}": gpu.joules for place, gpu in enumerate(sensors.gpus()) if gpu.joules is not None}
        watts = {**sensors.channel_watts(), **sensors.gpu_watts()}
        name, labels = "ls_edge_device", ["sensor"]
        yield _by_label(GaugeMetricFamily(f"{name}_power_watts", "Present power.", labels=labels), watts)
        yield _by_label(CounterMetricFamily(f"{name}_energy_joules", "Energy used.", labels=labels), joules)
        yield _by_label(
            GaugeMetricFamily(f"{name}_temperature_celsius", "Temperature.", labels=labels), state.temperatures_c
        )
        text = "1 if heat or a power limit slows the device down now."
        yield GaugeMetricFamily(f"{name}_throttled", text, value=float(bool(state.throttled)))


def add_collectors(registry: CollectorRegistry, collector: Collector, sensors: Sensors | None = None) -> None:
    """Add a collector and the metrics of the process (``process_*``) and its device to a registry."""
    registry.register(collector)
    registry.register(DeviceCollector(sensors or Sensors()))
    ProcessCollector(registry=registry)


def _build(role: str, name: str, bundle_id: str) -> Metric:
    value = {"version": __version__, "bundle_id": bundle_id, "role": role, "name": name}
    return InfoMetricFamily("ls_edge_build", "Version, bundle, role and name of this process.", value=value)


def _neighbors(up: Iterable[tuple[str, bool]], what: str) -> Metric:
    text = f"1 if this process {what} the peer of peers.yaml."
    return _by_label(GaugeMetricFamily("ls_edge_neighbor_up", text, labels=["peer"]), dict(up))


def _links(counts: LinkCounts, reroutes: int) -> Iterator[Metric]:
    text = "Bytes of messages, by the codec of tokens; none for everything else."
    family = CounterMetricFamily("ls_edge_link_bytes", text, labels=["direction", "codec"])
    for direction, by_codec in (("sent", counts.sent), ("received", counts.received)):
        for codec, count in dict(by_codec).items():  # a copy: the thread of the links may add a key
            family.add_metric([direction, codec], count)
    yield family
    yield CounterMetricFamily("ls_edge_reroutes", "Transfers that were sent again to another holder.", value=reroutes)
    text = "Peers suspected because they made no progress in time."
    yield _by_label(CounterMetricFamily("ls_edge_suspicions", text, labels=["peer"]), counts.suspicions)


def _dropped(counts: Mapping[str, int]) -> Iterator[Metric]:
    family = CounterMetricFamily(
        "ls_edge_dropped_messages", "Messages that were dropped or could not be sent, by reason.", labels=["reason"]
    )
    for reason in _REASONS:
        family.add_metric([reason.replace(" ", "_")], counts.get(reason, 0))
    yield family
    yield CounterMetricFamily(
        "ls_edge_complaints", "Messages of this process that others refused.", value=counts.get("complaints", 0)
    )
    yield CounterMetricFamily(
        "ls_edge_refused_connections",
        "Connections without a key of peers.yaml.",
        value=counts.get("connections refused", 0),
    )


def _by_label(family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, float]) -> Metric:
    """Return a family with the value of each label."""
    for label, value in dict(values).items():
        family.add_metric([label], value)
    return family


def _histogram(name: str, text: str, durations: Durations) -> Metric:
    counts = list(accumulate(durations.counts))
    buckets = list(zip([*map(str, durations.bounds_s), "+Inf"], map(float, counts), strict=True))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=durations.total_us / 1e6)
