"""The files and the bundle that a peer with a store serves next."""

import errno
import hashlib

import pytest
import yaml

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import BundleError, EngineError, LinkError, UsageError
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.change.record import AppliedFile
from ls_edge.runtime.peer.bundles import StoredBundle
from ls_edge.runtime.peer.setup import PeerSettings, PeerSetup
from ls_edge.runtime.store.store import Store


class Board:
    """A store of a peer with blocks 1 and 4, and the setup that it serves."""

    def __init__(self, folder, file, keys):
        entry = file.peer("a")
        self.store = Store(folder, entry.blocks)
        self.setup = PeerSetup(file, entry, keys["a"], PeerSettings())
        self.bundles = StoredBundle(self.store, self.setup, lambda: self.setup, lambda _: False)

    def apply(self, path, version, *, is_accepted=False):
        """Put a file into the store, as the present one or as one that is accepted; return it."""
        raw = path.read_bytes()
        file = AppliedFile(version, hashlib.sha256(raw).hexdigest())
        self.store.folder.joinpath("files", file.digest).write_bytes(raw)
        if is_accepted:
            self.store.accept(file, self.bundles.given)
        else:
            self.store.switch(self.store.record.active, file)
        return file

    def fill(self, bundle):
        """Serve a bundle from the store."""
        self.store.switch(self.store.fill(bundle))


@pytest.fixture
def board(tmp_path, file, keys):
    made = Board(tmp_path / "store", file, keys)
    yield made
    made.bundles.close()


@pytest.fixture
def other_file(file, tmp_path):
    """Write a copy of the file with other values in the entry of the peer, or of the source that may push."""

    def write(file_name, *, may_push=True, **values):
        document = yaml.safe_load(file.path.read_text())
        document["peers"][0] |= values
        document["sources"][0]["may_push"] = may_push
        path = tmp_path / file_name
        path.write_text(yaml.safe_dump(document))
        return path

    return write


def test_applied_files_are_used_instead_of_the_given_one(board, other_file, tiny_bundle):
    assert board.bundles.adopt(board.setup) is board.setup
    board.fill(Bundle.open(tiny_bundle))
    board.apply(other_file("one.yaml", blocks=[1]), 2)
    board.apply(other_file("next.yaml", blocks=[4]), 3, is_accepted=True)
    adopted = board.bundles.adopt(board.setup)
    assert [set(one.peer("a").blocks) for one in (adopted.peers, *adopted.newer)] == [{1}, {4}]
    assert board.bundles.read_again(board.setup).entry == adopted.entry


def test_a_damaged_applied_file_leaves_the_given_one(board, other_file, tiny_bundle, caplog):
    board.fill(Bundle.open(tiny_bundle))
    file = board.apply(other_file("one.yaml", blocks=[1]), 2)
    board.store.folder.joinpath("files", file.digest).write_bytes(b"damaged")
    assert board.bundles.adopt(board.setup).peers == board.setup.peers
    assert "the applied peers.yaml cannot be used" in caplog.text


def test_an_offered_file_gives_the_parts_or_is_refused(board, other_file, tiny_bundle, keys):
    bundle = Bundle.open(tiny_bundle)
    board.fill(bundle)
    offered = board.apply(other_file("two.yaml", blocks=[2]), 2, is_accepted=True)
    assert set(board.bundles.entry_in(offered, bundle).blocks) == {2}
    assert set(board.bundles.entry_in(None, bundle).blocks) == {1, 4}
    nobody = board.apply(other_file("nobody.yaml", may_push=False), 3, is_accepted=True)
    with pytest.raises(UsageError, match="the fleet could not be changed again"):
        board.bundles.entry_in(nobody, bundle)
    removed = board.apply(other_file("removed.yaml", name="b"), 4, is_accepted=True)
    assert board.bundles.entry_in(removed, bundle).blocks == ()
    changed = board.apply(other_file("key.yaml", public_key=keys["stranger"].public.decode()), 5, is_accepted=True)
    with pytest.raises(LinkError, match="key"):
        board.bundles.entry_in(changed, bundle)


def test_a_setup_is_limited_to_the_parts_that_are_there(board, tiny_bundle):
    bundle = Bundle.open(tiny_bundle)
    board.fill(bundle)
    assert board.bundles.opened(board.setup).entry == board.setup.entry
    (board.store.folder / "files" / bundle.part("block 4").sha256).unlink()
    assert set(board.bundles.opened(board.setup).entry.blocks) == {1}
    assert "its store lacks block 4" in board.bundles.installer.lacking
    (board.store.folder / "files" / bundle.part("block 1").sha256).unlink()
    with pytest.raises(BundleError, match="its store lacks blocks 1, 4"):
        board.bundles.opened(board.setup)


def test_only_a_fault_of_bundle_or_file_gives_them_up(board, other_file, tiny_bundle):
    board.fill(Bundle.open(tiny_bundle))
    board.store.confirm(board.store.record.active)
    for error in (EngineError("the driver is gone"), UsageError("this file has keys; give --secret-key")):
        with pytest.raises(type(error)):
            board.bundles.give_up(error)
    short = BundleError("cannot read block 1: Too many open files")
    short.__context__ = OSError(errno.EMFILE, "Too many open files")
    with pytest.raises(BundleError, match="Too many"):
        board.bundles.give_up(short)
    board.bundles.give_up(BundleError("block 1 is damaged"))
    assert board.bundles.opened(board.setup).bundle is None  # its only bundle waits for another one
    board.fill(Bundle.open(tiny_bundle))
    board.store.confirm(board.store.record.active)
    board.apply(other_file("one.yaml", blocks=[1]), 2)
    board.bundles.give_up(LinkError("no interface has its address"))
    assert board.store.record.reason.startswith("went back to the previous peers.yaml: no interface")
    assert load_peers(board.setup.peers.path).peer("a") == board.bundles.adopt(board.setup).entry
