"""The courses of an installer: jobs of its thread, the build of engines, and the trial of a new bundle."""

import contextlib
import hashlib
import threading
from types import SimpleNamespace

import pytest

from ls_edge.core.bundle import MANIFEST, Bundle
from ls_edge.core.errors import BundleError
from ls_edge.runtime.change.record import AppliedFile
from ls_edge.runtime.protocol.messages import Chunk, Install, Offer, Want
from ls_edge.runtime.store.installer import Installer
from ls_edge.runtime.store.jobs import StoreThread
from ls_edge.runtime.store.store import Store

RAW = b"peers: []\n"
FILE = AppliedFile(3, hashlib.sha256(RAW).hexdigest())
BLOCKS = (1, 4)


@pytest.fixture
def thread():
    made = StoreThread("a")
    yield made
    made.close()


def fail(error):
    raise error


def test_a_job_runs_on_the_thread_and_its_course_has_the_result(thread):
    def course():
        found.append((yield from thread.do(threading.get_ident)))

    found = []
    for _ in course():
        pass
    assert found != [threading.get_ident()]


@pytest.mark.parametrize(
    ("error", "expected"),
    [(BundleError("disk full"), "^disk full$"), (ValueError("odd"), "^the store failed: odd; apply again$")],
)
def test_a_course_raises_the_error_of_its_job(thread, error, expected):
    with pytest.raises(BundleError, match=expected):
        for _ in thread.do(lambda: fail(error)):
            pass


class Fleet:
    """Two engines to build."""

    given = b"the present file"

    def __init__(self):
        self.did, self.reopens, self.on_built = [], False, lambda: None

    def entry_in(self, _file, _bundle):
        return SimpleNamespace(blocks=BLOCKS)

    def build(self, _bundle, _file, on_step):
        for done in range(2):
            on_step(done, 2, f"block {done}\nof two")
            self.did.append(f"built {done}")
            self.on_built()
            yield None

    def follow(self):
        self.did.append("read")
        return self.use

    def use(self):
        self.did.append("used")
        return self.reopens


class Board:
    """An installer whose turns the test takes, and a pusher that answers each WANT."""

    def __init__(self, folder, bundle):
        self.fleet, self.store = Fleet(), Store(folder, BLOCKS)
        self.files = {hashlib.sha256(RAW).digest(): RAW}
        for path in (bundle / MANIFEST, *(bundle / part.file for _, part in Bundle.open(bundle).manifest.part_names())):
            self.files[hashlib.sha256(path.read_bytes()).digest()] = path.read_bytes()
        raw = (bundle / MANIFEST).read_bytes()
        self.offer = Offer(hashlib.sha256(raw).digest(), len(raw), bytes.fromhex(FILE.digest), len(RAW), FILE.version)
        self.sent, self.reports = [], []
        self.installer = Installer(self.store, "a", self.fleet)
        self.attach(serves=False)

    def attach(self, *, serves, warm=False):
        self.rules = SimpleNamespace(warm=warm)
        self.installer.attach(
            SimpleNamespace(send_to=lambda _, message: self.sent.append(message), wake=lambda: None),
            SimpleNamespace(neighbors=(), held={}, rules=self.rules),
            serves=serves,
        )
        self.installer.greeted("laptop")

    def turn(self):
        new, self.sent = self.sent, []
        for want in new:
            if isinstance(want, Want):
                data = self.files[want.digest][want.offset : want.offset + want.size]
                self.says(Chunk(want.digest, want.offset, data))
            else:
                self.stored = want
                self.reports.append(want.state)
        self.installer.step()

    def says(self, message):
        self.installer.receive("laptop", message)

    def is_at(self, state):
        self.turn()
        return self.stored.state == state


@pytest.fixture
def board(tmp_path, tiny_bundle):
    made = Board(tmp_path / "store", tiny_bundle)
    yield made
    made.installer.close()


def pushed(board, wait_until):
    """Push the bundle and its file until the peer serves them."""
    board.says(board.offer)
    wait_until(lambda: board.is_at("ready"))
    board.says(Install(board.offer.manifest))
    wait_until(lambda: (board.turn(), board.installer.is_switching)[1])
    board.attach(serves=True, warm=True)
    board.says(board.offer)
    wait_until(lambda: board.is_at("active"))


def test_a_file_is_accepted_after_its_engines_are_built_and_the_change_ends_last(board, wait_until):
    pushed(board, wait_until)
    assert board.fleet.did == ["built 0", "built 1", *["read", "used"] * 2]
    assert board.store.record.file == FILE
    assert [file.version for file in board.store.record.accepts] == [0]
    board.says(Install(board.offer.manifest, ends_change=True))
    wait_until(lambda: (board.turn(), len(board.fleet.did) == 8)[1])
    assert board.store.record.accepts == ()


def test_a_peer_whose_entry_has_not_changed_serves_on(board, wait_until):
    pushed(board, wait_until)
    board.files[hashlib.sha256(RAW * 2).digest()] = RAW * 2
    offer = Offer(board.offer.manifest, 0, hashlib.sha256(RAW * 2).digest(), len(RAW * 2), 4)
    board.says(offer)
    wait_until(lambda: board.is_at("ready"))
    board.says(Install(offer.manifest))
    wait_until(lambda: board.is_at("active"))
    assert not board.installer.is_switching
    assert (board.store.record.file.version, board.store.record.trial_starts) == (4, None)


@pytest.mark.parametrize("ending", ["another offer", "the pusher leaves"])
def test_a_build_ends_when_another_bundle_is_offered_but_not_with_its_pusher(board, wait_until, ending):
    go_on = threading.Event()
    board.fleet.on_built = lambda: go_on.wait(10)
    board.says(board.offer)
    wait_until(lambda: (board.turn(), board.fleet.did)[1])
    if ending == "another offer":
        board.says(Offer(board.offer.manifest, 0))
    else:
        board.installer.lost("laptop")
    go_on.set()
    if ending == "another offer":
        wait_until(lambda: board.is_at("ready"))
        assert board.fleet.did == ["built 0", "built 0", "built 1"]
        assert board.store.record.file is None
    else:
        wait_until(lambda: (board.turn(), "used" in board.fleet.did)[1])
        assert FILE in board.store.record.accepts
        assert board.fleet.did == ["built 0", "built 1", "read", "used"]


def test_a_switch_ends_without_its_pusher(board, wait_until):
    board.says(board.offer)
    wait_until(lambda: board.is_at("ready"))
    board.says(Install(board.offer.manifest))
    board.installer.lost("laptop")
    wait_until(lambda: (board.turn(), board.installer.is_switching)[1])
    assert board.store.record.file == FILE


def test_progress_is_reported(board, wait_until):
    go_on = threading.Event()
    board.fleet.on_built = lambda: go_on.wait(10)
    board.says(board.offer)
    wait_until(lambda: board.is_at("building") and board.stored.total)
    assert (board.stored.built, board.stored.total, board.stored.step) == (0, 2, "block 0 of two")
    go_on.set()
    wait_until(lambda: board.is_at("ready"))
    board.turn()
    assert (board.reports.count("ready"), board.stored.total) == (1, 0)  # a pusher takes a second one for a restart


def test_a_damaged_beginning_of_a_file_is_received_again(board, wait_until):
    digest = next(iter(board.files))
    board.store.folder.joinpath("files", f"{digest.hex()}.part").write_bytes(b"damaged")
    board.says(board.offer)
    wait_until(lambda: board.is_at("ready"))


def test_a_file_that_cannot_be_continued_fails_the_push(board, wait_until, tiny_bundle):
    part = Bundle.open(tiny_bundle).part("block 1")
    board.store.folder.joinpath("files", f"{part.sha256}.part").mkdir()
    board.says(board.offer)
    wait_until(lambda: board.is_at("failed"))
    assert "check the disk" in board.stored.reason


def test_a_piece_of_another_length_fails_the_push(board, wait_until):
    board.files = {digest: raw + b"more" for digest, raw in board.files.items()}
    board.says(board.offer)
    wait_until(lambda: board.sent)
    while not isinstance(want := board.sent.pop(), Want):
        wait_until(lambda: (board.installer.step(), board.sent)[1])
    board.says(Chunk(want.digest, 0, b"x"))
    wait_until(lambda: board.is_at("failed"))
    assert board.stored.reason == f"received 1 bytes, requested {want.size}; apply again"


def test_a_trial_ends_when_the_record_says_that_the_bundle_was_warm(board, wait_until, monkeypatch, tiny_bundle):
    monkeypatch.setattr("ls_edge.runtime.store.installer.AGAIN_S", 0.0)
    board.store.switch(board.store.fill(Bundle.open(tiny_bundle)))
    board.attach(serves=True)
    board.turn()
    assert board.installer.is_timed  # it waits until the peer is warm
    confirm, failures = board.store.confirm, iter(range(2))

    def refuse(manifest):
        with contextlib.suppress(StopIteration):
            raise BundleError(f"disk full, attempt {next(failures)}")
        confirm(manifest)

    monkeypatch.setattr(board.store, "confirm", refuse)
    board.rules.warm = True
    wait_until(lambda: (board.turn(), not board.installer.is_timed)[1])
    assert board.store.record.trial_starts is None
    assert next(failures, None) is None


def test_a_bundle_that_is_no_longer_active_is_not_recorded(board, tiny_bundle, half_bundle):
    board.store.switch(board.store.fill(Bundle.open(tiny_bundle)))
    board.attach(serves=True, warm=True)
    board.store.switch(board.store.fill(Bundle.open(half_bundle)))
    for _ in range(3):
        board.turn()
    assert board.installer.is_timed
    assert board.store.record.trial_starts is not None
