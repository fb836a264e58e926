"""The folder of a peer that takes bundles: what is whole, and what survives when the process stops at any moment."""

import errno
import hashlib
import json
import shutil

import msgspec
import pytest

from ls_edge.core.bundle import MANIFEST, Bundle, bundle_id_of, write_manifest
from ls_edge.core.errors import BundleError, DigestMismatch, UsageError
from ls_edge.runtime.store.store import TRIAL_STARTS, Store

BLOCKS = (1, 4)


def digest_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fill(store, bundle, blocks=BLOCKS, check=lambda _: None):
    """Bring everything that the store wants of a bundle; return the name of the bundle and what was brought."""
    manifest = digest_of(bundle / MANIFEST)
    opened = Bundle.open(bundle)
    files = {manifest: bundle / MANIFEST} | {
        part.sha256: bundle / part.file for _, part in opened.manifest.part_names()
    }
    brought = []
    while not (wanted := store.want(manifest, (bundle / MANIFEST).stat().st_size, blocks, check)).complete:
        for digest, size in wanted.missing:
            raw = files[digest].read_bytes()[store.received(digest) :]
            store.write(digest, store.received(digest), raw)
            store.finish(digest, size)
            brought.append((digest, len(raw)))
    return manifest, brought


def bring(store, folder, manifest, size):
    """Bring the parts that are wanted of a bundle whose manifest is there, and put it together."""
    by_digest = {digest_of(path): path for path in folder.rglob("*") if path.is_file()}
    for digest, length in store.want(manifest, size, BLOCKS, lambda _: None).missing:
        store.write(digest, 0, by_digest[digest].read_bytes())
        store.finish(digest, length)
    store.want(manifest, size, BLOCKS, lambda _: None)


@pytest.fixture
def store(tmp_path):
    opened = Store(tmp_path / "store")
    yield opened
    opened.close()


@pytest.fixture
def changed(tiny_bundle, tmp_path):
    """Make a bundle like ``tiny_bundle`` with other bytes in block 1, and ids that fit."""

    def make(raw=b"another", **part):
        folder = tmp_path / f"changed{len(list(tmp_path.glob('changed*')))}"
        shutil.copytree(tiny_bundle, folder)
        good = Bundle.open(tiny_bundle)
        blocks = list(good.manifest.parts.blocks)
        (folder / blocks[1].file).write_bytes(raw)
        said = {"sha256": hashlib.sha256(raw).hexdigest(), "bytes": len(raw), **part}
        blocks[1] = msgspec.structs.replace(blocks[1], **said)
        parts = msgspec.structs.replace(good.manifest.parts, blocks=tuple(blocks))
        bundle_id = bundle_id_of(good.interface, good.manifest.precision, parts)
        write_manifest(folder, msgspec.structs.replace(good.manifest, parts=parts, bundle_id=bundle_id))
        return folder

    return make


def test_only_the_parts_that_are_needed_are_there_and_verified(store, tiny_bundle):
    assert store.open_active() is None
    manifest, brought = fill(store, tiny_bundle)
    parts = [Bundle.open(tiny_bundle).manifest.parts.blocks[block] for block in BLOCKS]
    assert [digest for digest, _ in brought] == [manifest, *(part.sha256 for part in parts)]
    assert store.open_active() is None  # nothing is served before the switch
    store.switch(manifest)
    bundle = store.open_active()
    assert bundle.manifest == Bundle.open(tiny_bundle).manifest
    assert [len(bundle.read(f"block {block}")) for block in BLOCKS] == [part.bytes for part in parts]
    with pytest.raises(BundleError, match="is missing"):
        bundle.read("block 0")


def test_what_is_there_already_is_not_wanted_again(store, tiny_bundle, changed):
    fill(store, tiny_bundle)
    other = changed()
    manifest, brought = fill(store, other)
    assert [digest for digest, _ in brought] == [manifest, hashlib.sha256(b"another").hexdigest()]
    assert fill(store, other)[1] == []


def test_a_file_goes_on_where_it_was(tmp_path, tiny_bundle):
    manifest = digest_of(tiny_bundle / MANIFEST)
    store = Store(tmp_path / "store")
    store.write(manifest, 0, (tiny_bundle / MANIFEST).read_bytes()[:100])
    store.close()
    store = Store(tmp_path / "store")
    assert store.received(manifest) == 100
    _, brought = fill(store, tiny_bundle)
    assert brought[0] == (manifest, (tiny_bundle / MANIFEST).stat().st_size - 100)
    store.close()


def test_what_is_not_the_file_is_dropped(store):
    digest = hashlib.sha256(b"right").hexdigest()
    store.write(digest, 0, b"wrong")
    with pytest.raises(DigestMismatch, match="not the file that the manifest names"):
        store.finish(digest, 5)
    assert store.received(digest) == 0
    with pytest.raises(BundleError, match="has 0 bytes, and 3 were written"):
        store.write(digest, 3, b"ht")


def test_a_file_that_was_damaged_on_the_disk_is_wanted_again(store, tiny_bundle):
    manifest, _ = fill(store, tiny_bundle)
    store.switch(manifest)
    part = Bundle.open(tiny_bundle).manifest.parts.blocks[1]
    path = store.folder / "bundles" / manifest / part.file
    path.write_bytes(b"rust")
    with pytest.raises(DigestMismatch):
        store.open_active().read("block 1")
    assert fill(store, tiny_bundle)[1] == [(part.sha256, part.bytes)]
    assert store.open_active().read("block 1") == (tiny_bundle / part.file).read_bytes()


def test_the_bundle_before_is_kept_and_what_was_before_that_is_removed(store, tiny_bundle, changed):
    names = []
    for folder in (tiny_bundle, changed(b"second"), changed(b"third")):
        names.append(fill(store, folder)[0])
        store.switch(names[-1])
        store.confirm()
    assert (store.record.active, store.record.previous) == (names[2], names[1])
    fill(store, tiny_bundle)
    fill(store, changed(b"fourth"))
    kept = {path.name for path in (store.folder / "bundles").iterdir()}
    assert set(names[1:]) < kept
    assert names[0] not in kept
    assert hashlib.sha256(b"third").hexdigest() in {path.name for path in (store.folder / "files").iterdir()}


def test_a_bundle_that_never_gets_warm_is_given_up(tmp_path, tiny_bundle, changed):
    store = Store(tmp_path / "store")
    first, _ = fill(store, tiny_bundle)
    store.switch(first)
    store.confirm()
    second, _ = fill(store, changed())
    store.switch(second)
    starts = 0
    while store.record.active == second:
        store.close()
        store = Store(tmp_path / "store")
        why = store.begin()
        starts += 1
    assert starts == TRIAL_STARTS
    assert "did not become warm" in why
    assert (store.record.active, store.record.failed) == (first, second)
    assert store.begin() == ""
    assert not store.give_up("a good bundle is not given up")
    store.close()


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"file": "../out.onnx"}, "only files inside it"),
        ({"file": "/tmp/out.onnx"}, "only files inside it"),
        ({"file": MANIFEST}, "which no part may be called"),
        ({"file": "blocks/\n.onnx"}, "which no part may be called"),
        ({"sha256": "../../../etc/passwd"}, "or no SHA-256"),
        ({"sha256": "A" * 64}, "or no SHA-256"),
        ({"bytes": -1}, "a size of -1"),
        ({"bytes": 1 << 39}, "disk full"),
        ({"file": "blocks"}, "cannot write to the store"),
    ],
)
def test_a_manifest_cannot_lead_out_of_the_store(store, changed, part, said, tmp_path):
    folder = changed()
    document = json.loads((folder / MANIFEST).read_text())
    document["parts"]["blocks"][1] |= part
    good = Bundle.open(folder)
    blocks = list(good.manifest.parts.blocks)
    blocks[1] = msgspec.structs.replace(blocks[1], **part)
    parts = msgspec.structs.replace(good.manifest.parts, blocks=tuple(blocks))
    document["bundle_id"] = bundle_id_of(good.interface, good.manifest.precision, parts)
    (folder / MANIFEST).write_text(json.dumps(document))
    manifest = digest_of(folder / MANIFEST)
    raw = (folder / MANIFEST).read_bytes()
    store.write(manifest, 0, raw)
    store.finish(manifest, len(raw))
    before = sorted(path for path in tmp_path.rglob("*") if store.folder not in path.parents)
    with pytest.raises(BundleError, match=said):
        bring(store, folder, manifest, len(raw))
    assert sorted(path for path in tmp_path.rglob("*") if store.folder not in path.parents) == before
    assert list((store.folder / "bundles").iterdir()) == []
    assert store.record.active is None


def test_a_full_disk_drops_the_file_and_says_so(store, monkeypatch):
    digest = hashlib.sha256(b"x").hexdigest()
    store.write(digest, 0, b"begin")

    def full(*_args, **_named):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pathlib.Path.open", full)
    with pytest.raises(BundleError, match="disk full"):
        store.write(digest, 5, b"more")
    assert store.received(digest) == 0


def test_one_process_uses_a_store(store):
    with pytest.raises(UsageError, match="another process uses the store"):
        Store(store.folder)


@pytest.mark.parametrize("text", ["{", '{"schema": 2}', '{"active": "../../etc"}', '{"active": 3}'])
def test_a_record_that_cannot_be_read_is_said(tmp_path, text):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "store.json").write_text(text)
    with pytest.raises(UsageError, match=r"store\.json"):
        Store(tmp_path / "store")


def test_a_folder_that_cannot_be_a_store_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="give --store a folder"):
        Store(tmp_path / "file")
