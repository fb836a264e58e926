"""A source without a bundle takes the manifest of its peers only if two of them agree on it."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from ls_edge.core.bundle import Bundle, bundle_id_of, write_manifest
from ls_edge.core.errors import LinkError, ModelMismatch
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.clients.manifest import fetch_model
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.source.source import Source


@pytest.fixture
def swapped(tiny_bundle, tmp_path):
    """``tiny_bundle`` as a liar forges it: with its model id, its classes in another order, and an id of its own."""
    folder = tmp_path / "swapped"
    shutil.copytree(tiny_bundle, folder)
    manifest = Bundle.open(folder).manifest
    forged = msgspec.structs.replace(manifest, classes=tuple(reversed(manifest.classes)))
    bundle_id = bundle_id_of(Bundle(folder, forged).interface, forged.precision, forged.parts)
    write_manifest(folder, msgspec.structs.replace(forged, bundle_id=bundle_id))
    assert Bundle.open(folder).manifest.bundle_id != manifest.bundle_id
    return folder


def test_two_peers_that_agree_are_the_witnesses(serve_peers, tiny_bundle):
    bundle, witnesses = fetch_model(serve_peers({"a": "all", "b": "all"}), None, "laptop", 5.0)
    assert bundle.manifest == Bundle.open(tiny_bundle).manifest
    assert set(witnesses) == {"a", "b"}


def test_swapped_classes_of_one_peer_are_a_mismatch(write_peers, serve, tiny_bundle, swapped):
    file = load_peers(write_peers({"honest": "all", "liar": "all"}))
    serve(Peer(file, "honest", Bundle.open(tiny_bundle)))
    serve(Peer(file, "liar", Bundle.open(swapped)))
    with pytest.raises(ModelMismatch, match=r"do not agree on the model and its classes: .*; give --bundle to trust"):
        fetch_model(file, None, "laptop", 5.0)


@pytest.mark.parametrize("of_third", [False, True])
def test_with_strict_bundle_two_bundles_of_the_model_are_named(write_peers, serve, tiny_bundle, half_bundle, of_third):
    """The source took the bundle of the peer that was first, and then refused the other peers."""
    names = ["a", "b", "c"] if of_third else ["a", "c"]
    file = load_peers(write_peers(dict.fromkeys([*names, "gone"], "all")))
    for name in names:
        serve(Peer(file, name, Bundle.open(half_bundle if name == "c" else tiny_bundle)))
    ours, other = (Bundle.open(folder).manifest.bundle_id[:12] for folder in (tiny_bundle, half_bundle))
    with pytest.raises(ModelMismatch, match=rf"a has {ours}.*c has {other}; give --bundle to choose one"):
        Source.open(file, strict_bundle=True)
    with Source.open(file) as source:
        assert source.witnesses


def test_a_single_peer_is_believed(write_peers, serve, swapped):
    file = load_peers(write_peers({"liar": "all", "gone": "all"}))
    serve(Peer(file, "liar", Bundle.open(swapped)))
    bundle, witnesses = fetch_model(file, None, "laptop", 5.0)
    assert witnesses == ("liar",)
    assert bundle.manifest.classes == Bundle.open(swapped).manifest.classes


def test_without_a_peer_the_reasons_are_named(write_peers):
    with pytest.raises(LinkError, match=r"no peer of .* has sent the manifest of its model \(gone: .*\); start a peer"):
        fetch_model(load_peers(write_peers({"gone": "all"})), None, "laptop", 0.5)


def test_a_peer_that_starts_later_is_waited_for(write_peers, serve, tiny_bundle, wait_until, caplog):
    file = load_peers(write_peers({"a": "all"}))
    with ThreadPoolExecutor() as threads:
        fetched = threads.submit(fetch_model, file, None, "laptop", 30.0)
        wait_until(lambda: fetched.done() or "waiting for a model" in caplog.text)
        assert "a: nobody answers at tcp://127.0.0.1" in caplog.records[-1].why
        serve(Peer(file, "a", Bundle.open(tiny_bundle)))
        assert fetched.result()[1] == ("a",)
