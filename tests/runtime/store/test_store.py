"""The store of a peer keeps complete bundles, whenever the process stops."""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import shutil
import subprocess

import msgspec
import pytest

from ls_edge.core.bundle import MANIFEST, Bundle, bundle_id_of, write_manifest
from ls_edge.core.errors import BundleError, DigestMismatch, UsageError
from ls_edge.core.parts import HEAD, STEM, part_name
from ls_edge.core.peers_file import HeldParts
from ls_edge.runtime.change.record import TRIAL_STARTS
from ls_edge.runtime.store.files import digest_of
from ls_edge.runtime.store.store import Store

BLOCKS = (1, 4)


def fill(store, bundle, check=lambda _: BLOCKS):
    """Write all files of a bundle that the store wants; return the digest of the manifest, and the written files."""
    manifest = digest_of(bundle / MANIFEST)
    opened = Bundle.open(bundle)
    files = {manifest: bundle / MANIFEST} | {
        part.sha256: bundle / part.file for _, part in opened.manifest.part_names()
    }
    written = []
    while (wanted := store.want(manifest, (bundle / MANIFEST).stat().st_size, check)).missing:
        for digest, size in wanted.missing:
            raw = files[digest].read_bytes()[store.received(digest) :]
            store.write(digest, size, store.received(digest), raw)
            written.append((digest, len(raw)))
    return manifest, written


def write_parts(store, folder, manifest, size):
    """Write the wanted parts of a bundle whose manifest is in the store."""
    by_digest = {digest_of(path): path for path in folder.rglob("*") if path.is_file()}
    for digest, length in store.want(manifest, size, lambda _: BLOCKS).missing:
        store.write(digest, length, 0, by_digest[digest].read_bytes())
    store.want(manifest, size, lambda _: BLOCKS)


@pytest.fixture
def store(tmp_path):
    opened = Store(tmp_path / "store", BLOCKS)
    yield opened
    opened.close()


@pytest.fixture
def changed(tiny_bundle, tmp_path):
    """Create a bundle like ``tiny_bundle`` with other bytes in block 1, and matching ids."""

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


def test_only_needed_parts_are_stored_and_verified(store, tiny_bundle):
    assert store.open_active() is None
    manifest, written = fill(store, tiny_bundle)
    parts = [Bundle.open(tiny_bundle).manifest.parts.blocks[block] for block in BLOCKS]
    assert [digest for digest, _ in written] == [manifest, *(part.sha256 for part in parts)]
    assert store.open_active() is None  # no bundle is served before the switch
    store.switch(manifest)
    bundle = store.open_active()
    assert bundle.manifest.bundle_id == Bundle.open(tiny_bundle).manifest.bundle_id
    assert [len(bundle.read(f"block {block}")) for block in BLOCKS] == [part.bytes for part in parts]
    with pytest.raises(BundleError, match="is missing"):
        bundle.read("block 0")


@pytest.mark.parametrize("held", [(STEM, 0), (2, HEAD), HeldParts.parse("all")])
def test_a_store_is_filled_with_stem_and_head(tmp_path, tiny_bundle, held):
    bundle = Bundle.open(tiny_bundle)
    with contextlib.closing(Store(tmp_path / "store", held)) as store:
        store.switch(store.fill(bundle))
        parts = store.blocks.of_model(bundle.num_blocks)
        assert store.held(bundle) == parts
        opened = store.open_active()
        assert all(opened.read(part_name(part)) == bundle.read(part_name(part)) for part in parts)


def test_an_incomplete_file_is_continued(tmp_path, tiny_bundle):
    manifest = digest_of(tiny_bundle / MANIFEST)
    store = Store(tmp_path / "store", BLOCKS)
    store.write(manifest, 1000, 0, (tiny_bundle / MANIFEST).read_bytes()[:100])
    store.close()
    store = Store(tmp_path / "store", BLOCKS)
    assert store.received(manifest) == 100
    _, written = fill(store, tiny_bundle)
    assert written[0] == (manifest, (tiny_bundle / MANIFEST).stat().st_size - 100)
    store.close()


def test_a_file_with_another_digest_is_dropped(store):
    digest = hashlib.sha256(b"right").hexdigest()
    with pytest.raises(DigestMismatch, match="not the file that the manifest names"):
        store.write(digest, 5, 0, b"wrong")
    assert store.received(digest) == 0
    with pytest.raises(BundleError, match="has 0 bytes, expected 3"):
        store.write(digest, 5, 3, b"ht")


def test_the_previous_bundle_is_kept_and_older_ones_are_removed(store, tiny_bundle, changed):
    names = []
    for folder in (tiny_bundle, changed(b"second"), changed(b"third")):
        names.append(fill(store, folder)[0])
        store.switch(names[-1])
        store.confirm(store.record.active)
    assert (store.record.active, store.record.previous) == (names[2], names[1])
    fill(store, tiny_bundle)
    fill(store, changed(b"fourth"))
    kept = {path.name for path in (store.folder / "files").iterdir()}
    assert set(names[1:]) < kept
    assert names[0] not in kept
    assert hashlib.sha256(b"third").hexdigest() in kept


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_only_plain_files_are_read(store, tiny_bundle, make):
    """A pipe in the place of a manifest kept the peer from starting, and from ending on SIGTERM."""
    manifest, _ = fill(store, tiny_bundle)
    store.switch(manifest)
    (store.folder / "files" / manifest).unlink()
    make(store.folder / "files" / manifest)
    with pytest.raises(BundleError, match="is missing or damaged; apply the bundle again"):
        store.open_active()


def test_a_bundle_that_never_becomes_warm_is_given_up(tmp_path, tiny_bundle, changed):
    store = Store(tmp_path / "store", BLOCKS)
    first, _ = fill(store, tiny_bundle)
    store.switch(first)
    store.confirm(store.record.active)
    second, _ = fill(store, changed())
    store.switch(second)
    starts = 0
    while store.record.active == second:
        store.close()
        store = Store(tmp_path / "store", BLOCKS)
        store.begin()
        starts += 1
    assert starts == TRIAL_STARTS
    assert "went back to the previous bundle: it did not become warm in 3 starts" in store.record.reason
    assert (store.record.active, store.record.failed) == (first, second)
    store.begin()
    assert not store.give_up("the only bundle is not given up")
    assert store.record.active == first
    store.close()


def test_the_only_bundle_is_never_given_up(tmp_path, tiny_bundle):
    store = Store(tmp_path / "store", BLOCKS)
    first, _ = fill(store, tiny_bundle)
    store.switch(first)
    for _ in range(TRIAL_STARTS + 2):
        store.close()
        store = Store(tmp_path / "store", BLOCKS)
        store.begin()
        assert (store.record.active, store.record.previous) == (first, None)
        assert store.open_active() is not None
    assert "there is no previous bundle to go back to: it did not become warm in 3 starts" in store.record.reason
    assert store.record.trial_starts is not None
    store.confirm(first)
    assert (store.record.trial_starts, store.record.reason, store.record.failed) == (None, "", None)
    store.close()


def flip(path, at=0.5):
    """Change one bit of a file."""
    raw = bytearray(path.read_bytes())
    raw[int(len(raw) * at)] ^= 1
    path.write_bytes(bytes(raw))


def part_of(store, manifest, block):
    files = store.folder / "files"
    return files / Bundle.open(files, manifest).manifest.parts.blocks[block].sha256


def two_bundles(store, *folders):
    names = []
    for folder in folders:
        names.append(fill(store, folder)[0])
        store.switch(names[-1])
        store.confirm(names[-1])
    return names


def test_a_damaged_bundle_is_given_up_only_for_a_complete_one(store, tiny_bundle, changed):
    first, second = two_bundles(store, tiny_bundle, changed())
    flip(part_of(store, first, 4))  # both bundles have this file
    assert not store.give_up("a part is damaged")
    assert (store.record.active, store.record.previous, store.record.failed) == (second, first, second)
    assert store.record.reason == "the previous bundle is not complete either: a part is damaged"
    fill(store, tiny_bundle)
    assert store.give_up("a part is damaged")
    assert (store.record.active, store.record.previous, store.record.failed) == (first, None, second)
    assert json.loads((store.folder / "store.json").read_text())["active"] == first


def test_a_removed_or_garbled_store_is_written_again(store, tiny_bundle):
    manifest, _ = fill(store, tiny_bundle)
    store.switch(manifest)
    (store.folder / "store.json").write_text("{")
    store.compare()
    assert "(store.json:1:2: not JSON, " in store.difference
    fill(store, tiny_bundle)
    assert (json.loads((store.folder / "store.json").read_text())["active"], store.difference) == (manifest, "")
    shutil.rmtree(store.folder)
    with pytest.raises(BundleError, match="missing or damaged"):
        store.switch(hashlib.sha256(b"another").hexdigest())
    assert len(fill(store, tiny_bundle)[1]) == 1 + len(BLOCKS)
    assert store.open_active() is not None
    assert json.loads((store.folder / "store.json").read_text())["active"] == manifest
    with pytest.raises(UsageError, match="another process uses"):
        Store(store.folder, BLOCKS)


def test_a_read_only_store_serves_and_is_not_confirmed(small_disk, tiny_bundle):
    disk = small_disk(megabytes=8)
    store = Store(disk / "store", BLOCKS)
    manifest, _ = fill(store, tiny_bundle)
    store.switch(manifest)
    store.close()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    store = Store(disk / "store", BLOCKS)
    store.begin()
    assert store.record.trial_starts == 1  # the start could not be recorded
    assert store.open_active() is not None
    with pytest.raises(BundleError, match="Read-only file system"):
        store.confirm(manifest)
    assert store.record.trial_starts is not None
    with pytest.raises(BundleError, match="Read-only file system"):
        store.want("0" * 64, 10, lambda _: BLOCKS)
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    store.confirm(manifest)
    assert store.record.trial_starts is None
    store.close()


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"file": "../out.onnx"}, "only files inside it"),
        ({"file": "/tmp/out.onnx"}, "only files inside it"),
        ({"sha256": "../../../etc/passwd"}, "a SHA-256 in hexadecimal"),
        ({"sha256": "A" * 64}, "a SHA-256 in hexadecimal"),
        ({"bytes": -1}, "a whole number from 0"),
        ({"bytes": 1 << 40}, "a whole number from 0"),
        ({"bytes": 1 << 39}, "disk full"),
    ],
)
def test_a_manifest_cannot_name_files_outside_the_store(store, changed, part, said, tmp_path):
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
    store.write(manifest, len(raw), 0, raw)
    before = sorted(path for path in tmp_path.rglob("*") if store.folder not in path.parents)
    with pytest.raises(BundleError, match=said):
        write_parts(store, folder, manifest, len(raw))
    assert sorted(path for path in tmp_path.rglob("*") if store.folder not in path.parents) == before
    assert store.record.active is None


def test_a_full_disk_drops_the_file_and_is_reported(small_disk):
    disk = small_disk(megabytes=1)
    store = Store(disk / "store", BLOCKS)
    raw = bytes(2 << 20)
    digest = hashlib.sha256(raw).hexdigest()
    store.write(digest, len(raw), 0, raw[: 1 << 18])
    with pytest.raises(BundleError, match="disk full"):
        store.write(digest, len(raw), 1 << 18, raw[1 << 18 :])
    assert store.received(digest) == 0
    store.close()


def test_only_one_process_can_use_a_store(store):
    half = store.folder / ".store.json.99.part"
    half.touch()
    with pytest.raises(UsageError, match="another process uses"):
        Store(store.folder, BLOCKS)
    assert half.exists()
    store.close()
    Store(store.folder, BLOCKS).close()
    assert not half.exists()  # left behind in a power cut


@pytest.mark.parametrize(
    "text",
    [None, "", "{", '{"schema": 2}', '{"active": "../../etc"}', '{"active": 3}', '{"actiwe": null}', "\0" * 9, "\xff"],
)
def test_an_unreadable_record_leaves_an_empty_store(tmp_path, tiny_bundle, changed, text):
    """The peer waits, a push of another bundle removes nothing, and the next push sends only missing files."""
    store = Store(tmp_path / "store", BLOCKS)
    manifest, _ = fill(store, tiny_bundle)
    store.switch(manifest)
    store.close()
    record = tmp_path / "store" / "store.json"
    record.unlink() if text is None else record.write_bytes(text.encode("latin-1"))
    store = Store(tmp_path / "store", BLOCKS)
    store.begin()
    assert (store.open_active(), store.record.reason[-24:]) == (None, "; apply the bundle again")
    fill(store, changed())
    assert fill(store, tiny_bundle)[1] == []
    store.switch(manifest)
    assert (store.record.active, store.record.reason) == (manifest, "")
    store.close()


def test_an_unusable_folder_is_a_usage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="give --store a writable folder"):
        Store(tmp_path / "file", BLOCKS)


@pytest.mark.parametrize("error", [errno.EIO, errno.EMFILE, errno.ENOMEM, errno.EACCES])
@pytest.mark.parametrize("first", [1, 2, 3])
def test_an_error_of_reading_removes_no_file(store, tiny_bundle, changed, monkeypatch, error, first):
    """Each call from ``first`` on fails, while the next bundle is offered to a store with two."""
    for bundle in (tiny_bundle, changed()):
        store.switch(fill(store, bundle)[0])
    before = {path.name: path.read_bytes() for path in (store.folder / "files").iterdir()}
    offered, calls = changed(b"third"), itertools.count(1)

    def fail(path, *arguments, **named):
        if str(path).startswith(str(store.folder / "files")) and next(calls) >= first:
            raise OSError(error, os.strerror(error))
        return lstat(path, *arguments, **named)

    lstat = os.lstat
    monkeypatch.setattr(os, "lstat", fail)
    with pytest.raises(BundleError, match=os.strerror(error)):
        fill(store, offered)
    monkeypatch.undo()
    after = {path.name: path.read_bytes() for path in (store.folder / "files").iterdir()}
    assert {name: after[name] for name in before} == before
    assert store.open_active() is not None


def test_nothing_is_removed_while_a_kept_manifest_cannot_be_opened(store, tiny_bundle, changed):
    for bundle in (tiny_bundle, changed()):
        store.switch(fill(store, bundle)[0])
    kept = {path.name for path in (store.folder / "files").iterdir()}
    (store.folder / "files" / store.record.previous).write_bytes(b"damaged")
    fill(store, changed(b"third"))
    assert kept <= {path.name for path in (store.folder / "files").iterdir()}


def test_a_record_that_cannot_be_read_is_an_error(tmp_path):
    Store(tmp_path / "store", BLOCKS).close()
    (tmp_path / "store" / "store.json").mkdir()
    with pytest.raises(UsageError, match=r"cannot read .*store.json: Is a directory; check the disk"):
        Store(tmp_path / "store", BLOCKS)
