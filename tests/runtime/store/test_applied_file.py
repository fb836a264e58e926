"""A store keeps the applied ``peers.yaml`` together with the bundle, whenever the process stops."""

import contextlib
import hashlib

import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import BundleError
from ls_edge.runtime.change.record import TRIAL_STARTS, AppliedFile, StoreRecord
from ls_edge.runtime.store.store import Store

BLOCKS = (1, 4)


@contextlib.contextmanager
def opened(folder):
    store = Store(folder, BLOCKS)
    try:
        yield store
    finally:
        store.close()


def keep(store, manifest, raw, version):
    """Store a file as a pusher sends it."""
    file = AppliedFile(version, hashlib.sha256(raw).hexdigest())
    wanted = store.want(manifest, 0, lambda _: BLOCKS, (file.digest, len(raw)))
    if wanted.missing:
        assert wanted.missing == ((file.digest, len(raw)),)
        store.write(file.digest, len(raw), 0, raw)
        assert store.want(manifest, 0, lambda _: BLOCKS, (file.digest, len(raw))).missing == ()
    return file


@pytest.fixture
def folder(tmp_path, tiny_bundle):
    with opened(tmp_path / "store") as store:
        manifest = store.fill(Bundle.open(tiny_bundle))
        store.switch(manifest)
        store.confirm(manifest)
    return store.folder


@pytest.fixture
def texts(write_peers):
    path = write_peers({"a": (0,)}, sources=["laptop"])
    return [path.read_bytes() + b"# %d\n" % number for number in range(4)]


def state(folder):
    """Return file, other accepted files, and active bundle as a restarted process finds them."""
    with opened(folder) as store:
        record = store.record
        present = [file.version for file in (record.file, *record.accepts) if file is not None]
        assert all(store.read_file(file).raw for file in (record.file, *record.accepts) if file is not None)
        return present, record.active is not None


def test_a_change_is_recorded_step_by_step(folder, texts):
    assert state(folder) == ([], True)
    with opened(folder) as store:
        manifest = store.record.active
        first = keep(store, manifest, texts[1], 1)
        assert state_of(store) == []  # received, and nothing else
        store.accept(first, texts[0])
    assert state(folder) == ([0, 1], True)
    with opened(folder) as store:
        store.switch(manifest, first)
        store.confirm(manifest)
    assert state(folder) == ([1, 0], True)
    with opened(folder) as store:
        store.change(StoreRecord.ended)
    assert state(folder) == ([1], True)
    with opened(folder) as store:  # two further changes, the first of which is not completed
        for version in (2, 3):
            store.accept(keep(store, manifest, texts[version], version), b"")
    assert state(folder) == ([1, 3, 2], True)
    with opened(folder) as store:
        store.change(StoreRecord.ended)
        keep(store, manifest, texts[2], 4)
        names = {path.name for path in (folder / "files").iterdir()}
        assert hashlib.sha256(texts[3]).hexdigest() not in names, "files that nothing needs are removed"


def state_of(store):
    return [file.version for file in (store.record.file, *store.record.accepts) if file is not None]


def test_a_file_with_which_the_peer_never_becomes_warm_is_given_up(folder, texts):
    with opened(folder) as store:
        manifest = store.record.active
        file = keep(store, manifest, texts[1], 1)
        store.accept(file, texts[0])
        store.switch(manifest, file)
    for _ in range(TRIAL_STARTS - 1):
        with opened(folder) as store:
            store.begin()
            assert store.record.file.version == 1
    with opened(folder) as store:
        store.begin()
        assert (store.record.active, store.record.file.version) == (manifest, 0)
        assert "went back to the previous peers.yaml" in store.record.reason
        store.confirm(manifest)
        assert store.record.trial_starts is None
        assert store.record.reason, "it stays until that file can be served"


def test_a_removed_peer_serves_nothing_and_can_be_added_again(folder, texts):
    with opened(folder) as store:
        manifest = store.record.active
        file = keep(store, manifest, texts[1], 1)
        store.accept(file, texts[0])
        store.switch(manifest, file, is_listed=False)
        assert store.open_active() is None
        assert store.record.reason == "removed from the fleet by version 1 of peers.yaml"
    assert state(folder) == ([0, 1], False)
    with opened(folder) as store:
        again = keep(store, manifest, texts[2], 2)
        assert store.want(manifest, 0, lambda _: BLOCKS).missing == (), "its parts are kept"
        store.accept(again, b"")
        store.switch(manifest, again)
        store.confirm(manifest)
        assert (store.record.active, store.record.reason) == (manifest, "")


def test_a_damaged_file_is_not_used(folder, texts):
    with opened(folder) as store:
        file = keep(store, store.record.active, texts[1], 1)
        (folder / "files" / file.digest).write_bytes(texts[2])
        with pytest.raises(BundleError, match="missing or damaged"):
            store.read_file(file)
