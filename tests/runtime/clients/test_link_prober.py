"""Real peers measure the links between them."""

import numpy as np
import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import LinkError, UsageError
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.clients.link_prober import LinkProber, fit_of
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.transport.keys import load_secret, new_keys

CODECS = ("raw", "fp16", "int8")


@pytest.fixture
def bundle(wide_bundle):
    return Bundle.open(wide_bundle)


@pytest.mark.release
def test_every_pair_is_measured_in_every_codec(bundle, serve_peers):
    """``b`` and ``c`` hold the same block, and hand it over nevertheless."""
    file = serve_peers({"a": [0], "b": [1], "c": [1]}, bundle.folder, sources=["laptop"])
    steps = []
    with LinkProber(file, bundle) as prober:
        found = prober.measure(transfers=5, on_step=lambda *step: steps.append(step), wait=20)
    assert found.source == "laptop"
    pairs = {("laptop", "a"), ("laptop", "b"), ("laptop", "c"), ("a", "laptop"), ("b", "laptop"), ("c", "laptop"),
             ("a", "b"), ("a", "c"), ("b", "a"), ("c", "a"), ("b", "c"), ("c", "b")}  # fmt: skip
    measured = {(one.origin, one.to, one.codec) for one in found.transfers}
    assert measured == {(*pair, codec) for pair in pairs for codec in CODECS}
    sizes = {one.codec: one.bytes for one in found.transfers}
    assert sizes == {"raw": 16 * 768 * 4, "fp16": 16 * 768 * 2, "int8": 16 * 768 + 16 * 4}
    assert all(0 < one.p50_ms <= one.p95_ms for one in found.transfers)
    assert {(fit.origin, fit.to) for fit in found.fits} == pairs
    assert found.missing == []
    assert steps[-1] == (12, 12, "done")
    calls = {one.peer: one for one in found.calls}
    assert set(calls) == {"a", "b", "c"}
    assert all(one.calls > 5 and 0 < one.p50_ms <= one.p95_ms for one in found.calls)


def test_a_missing_peer_is_listed_and_keys_have_to_match(bundle, write_peers, serve, tmp_path):
    keys = {name: new_keys(name, tmp_path)[0] for name in ("a", "b", "gone", "laptop")}
    path = write_peers({"a": [0], "b": [1], "gone": [0]}, keys=keys, sources=["laptop"])
    for name in "ab":
        serve(Peer.open(path, name, bundle.folder, secret_key=tmp_path / f"{name}.key_secret"))
    file = load_peers(path)
    with pytest.raises(UsageError, match=r"give --secret-key NAME\.key_secret"):
        LinkProber(file, bundle)
    with pytest.raises(UsageError, match="belongs to no source"):
        LinkProber(file, bundle, keys=load_secret(tmp_path / "a.key_secret"))
    with LinkProber(file, bundle, keys=load_secret(tmp_path / "laptop.key_secret")) as prober:
        found = prober.measure(transfers=3, codec_names=("fp16",), wait=4)
    assert {(one.origin, one.to) for one in found.transfers} == {
        ("a", "b"), ("b", "a"), ("laptop", "a"), ("laptop", "b"), ("a", "laptop"), ("b", "laptop"),
    }  # fmt: skip
    assert [(origin, to) for origin, to, _ in found.missing] == [("laptop", "gone")]
    assert all(fit.mbit_per_s is fit.latency_ms is None for fit in found.fits)  # one size tells neither


def test_peers_of_another_model_and_missing_peers_are_errors(bundle, tiny_bundle, write_peers, serve):
    path = write_peers({"a": [0]})
    with LinkProber(load_peers(path), bundle) as prober, pytest.raises(LinkError, match=r"no peer of .* can be used"):
        prober.measure(transfers=3, wait=0.3)
    serve(Peer.open(path, "a", tiny_bundle))
    with LinkProber(load_peers(path), bundle) as prober, pytest.raises(LinkError, match="model"):
        prober.measure(transfers=3, wait=5)


def test_latency_and_bandwidth_are_those_of_a_line_through_the_codecs():
    exact = {size: [0.5 + size / 125_000] * 5 for size in (600_000, 300_000, 150_000)}
    fit = fit_of("a", "b", exact)
    assert (fit.latency_ms, fit.mbit_per_s, *fit.mbit_per_s_interval) == pytest.approx((0.5, 1e3, 1e3, 1e3))
    assert fit_of("a", "b", {600: [1.0] * 5, 300: [2.0] * 5}).mbit_per_s is None
    assert fit_of("a", "b", {600: [1.0] * 5}).latency_ms is None


def test_outliers_hardly_change_a_fit_and_its_interval_holds_the_truth():
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(50):
        sizes = {size: 0.5 + size / 125_000 + rng.exponential(0.2, 20) for size in (600_000, 300_000, 150_000)}
        sizes[150_000][:3] = 80.0  # a stalled link
        fit = fit_of("a", "b", sizes)
        assert fit.mbit_per_s == pytest.approx(1e3, rel=0.2)
        held += fit.mbit_per_s_interval[0] <= 1e3 <= fit.mbit_per_s_interval[1]
    assert held >= 45


def test_a_link_whose_noise_hides_its_bandwidth_has_none():
    rng = np.random.default_rng(1)
    named = sum(
        fit_of("a", "b", {size: rng.exponential(3.0, 20) for size in (600, 300, 150)}).mbit_per_s is not None
        for _ in range(100)
    )
    assert named <= 5
