"""A source follows the files that its peers announce."""

import hashlib
import threading

import pytest

from ls_edge.core.errors import LinkError, UsageError
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.protocol.messages import FileVersion, Hello
from ls_edge.runtime.source.follower import Follower


@pytest.fixture
def file(write_peers):
    return load_peers(write_peers({"a": (0,), "b": (0,), "c": (0,)}, sources=["laptop"]))


class Used:
    """The files that a follower uses."""

    def __init__(self):
        self.files, self.event, self.error = [], threading.Event(), None

    def __call__(self, file):
        self.files.append(file)
        self.event.set()
        if self.error is not None:
            raise self.error


def hello(name, *files, role="peer"):
    return Hello(name, role, 1, 0, "m", "b", files=files)


def version_of(file, number):
    return FileVersion(number, hashlib.sha256(file.raw).digest())


def test_the_newest_file_of_a_linked_peer_is_followed(file):
    used, applied = Used(), version_of(file, 3)
    follower = Follower("laptop", file, None, used)
    # Sources do not count, nor does the file with which a peer was started.
    others = [hello("laptop.00000001", version_of(file, 9), role="source"), hello("b", version_of(file, 0))]
    assert not follower.look(others)
    assert follower.look([hello("a", applied), *others])
    assert used.event.wait(10)
    follower._thread.join(10)
    assert follower.files == (applied,)
    assert not follower.look([hello("a", applied), *others])


def test_the_file_before_counts_until_a_change_has_ended(file, write_peers):
    used = Used()
    follower = Follower("laptop", file, None, used)
    new = load_peers(write_peers({"a": (0,), "b": (0,), "d": (0,)}, sources=["laptop"]))
    applied = version_of(new, 1)
    follower._known[applied.digest] = new  # otherwise it is fetched
    # Every board was started with a file of other bytes.
    during = [hello(name, FileVersion(0, name.encode() * 32), applied) for name in "abc"]
    for hellos, names in ((during, ["a", "b", "c", "d"]), ([hello(name, applied) for name in "abc"], ["a", "b", "d"])):
        assert follower.look(hellos)
        follower._thread.join(10)
        assert sorted(peer.name for peer in used.files[-1].peers) == names
        assert not follower.look(hellos)


def test_a_file_that_the_source_cannot_use_changes_nothing(file, caplog, monkeypatch):
    monkeypatch.setattr("ls_edge.runtime.source.follower.AGAIN_S", 0.0)
    used = Used()
    used.error = UsageError("changes the heartbeat")
    follower = Follower("laptop", file, None, used)
    hellos = [hello(name, version_of(file, 1)) for name in "abc"]
    for _ in range(3):  # again later
        assert follower.look(hellos)
        follower._thread.join(10)
    assert (follower.files, len(used.files), caplog.text.count("not following")) == ((version_of(file, 0),), 3, 1)


def test_a_file_that_could_not_be_fetched_is_asked_for_again_once_other_peers_have_it(file, monkeypatch):
    monkeypatch.setattr("ls_edge.runtime.source.follower.AGAIN_S", 3600.0)
    asked = []

    def fetch(_peers, _keys, _owner, _file, names):
        asked.append(names)
        if "c" not in names:
            raise LinkError("they have gone")
        return file

    monkeypatch.setattr("ls_edge.runtime.source.follower.fetch_file", fetch)
    used = Used()
    follower = Follower("laptop", file, None, used)
    follower._known.clear()
    applied = version_of(file, 1)
    for announcing in ("ab", "ab", "bc"):
        hellos = [hello(name, *([applied] if name in announcing else [])) for name in "abc"]
        assert follower.look(hellos)
        follower._thread.join(10)
    assert asked == [["a", "b"], ["b", "c"]]
    assert (follower.files, len(used.files)) == ((applied,), 1)


def test_a_file_stays_in_use_until_its_change_has_ended_although_peers_are_lost(file, write_peers):
    used = Used()
    follower = Follower("laptop", file, None, used)
    files = [load_peers(write_peers({"a": (0,), "b": (0,), name: (0,)}, sources=["laptop"])) for name in "de"]
    for one in files:
        follower._known[hashlib.sha256(one.raw).digest()] = one
    first, second, again = version_of(files[0], 2), version_of(files[1], 3), version_of(files[0], 4)
    # The first file is applied again; c serves by it since it was version 2.
    during = {"a": (second, again), "b": (second, again), "c": (first, second)}

    def look(names):
        is_new = follower.look([hello(name, *during[name]) for name in names])
        if is_new:
            follower._thread.join(10)
        return is_new

    assert look("abc")
    assert follower.files == (again, second, version_of(file, 0))
    for names in ("ac", "bc", "c", "ab", "abc"):
        assert not look(names)
    assert follower.files == (again, second, version_of(file, 0))
    during["a"] = during["b"] = during["c"] = (again,)
    assert look("abc")
    assert follower.files == (again,)
    assert sorted(peer.name for peer in used.files[-1].peers) == ["a", "b", "d"]
