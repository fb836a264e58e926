"""The thread of a store, the build of engines and the trial of a new bundle."""

import threading

import pytest

from ls_edge.core.errors import BundleError
from ls_edge.runtime.change.record import AppliedFile
from ls_edge.runtime.store.jobs import NO_PROGRESS, EngineBuild, StoreThread, Trial

FILE = AppliedFile(3, "0" * 64)


class Link:
    """The node whose thread handles results."""

    def __init__(self):
        self.woken = threading.Event()

    def wake(self):
        self.woken.set()


@pytest.fixture
def thread():
    made = StoreThread("a")
    made.node = Link()
    yield made
    made.close()


def handled(thread, wait_until):
    wait_until(thread.node.woken.is_set)
    thread.node.woken.clear()
    thread.handle_results()


def fail(error):
    raise error


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (lambda: 7, ("then", 7)),
        (lambda: fail(BundleError("disk full")), ("failed", "disk full")),
        (lambda: fail(ValueError("odd")), ("failed", "the store failed: odd; apply again")),
    ],
)
def test_the_result_of_a_job_is_handled_on_the_thread_of_the_links(thread, wait_until, job, expected):
    said, here = [], threading.get_ident()
    thread.do(
        job,
        lambda value: said.append(("then", value, threading.get_ident())),
        lambda why: said.append(("failed", why, threading.get_ident())),
    )
    assert said == []
    handled(thread, wait_until)
    assert said == [(*expected, here)]


class Fleet:
    """Two engines to build."""

    def __init__(self):
        self.did = []

    def build(self, _bundle, _file, on_step):
        for done in range(2):
            on_step(done, 2, f"block {done}\nof two")
            self.did.append(f"built {done}")
            yield None

    def accept(self, file):
        self.did.append(("accepted", file))

    def follow(self):
        self.did.append("read")
        return lambda: True


def test_a_file_is_accepted_after_its_engines_are_built():
    fleet, woken = Fleet(), []
    build = EngineBuild(fleet, lambda: woken.append(None))
    assert not build.has_news()
    use = build.run(None, FILE, lambda: True)
    assert fleet.did == ["built 0", "built 1", ("accepted", FILE), "read"]
    assert use()
    assert (build.has_news(), build.has_news(), len(woken)) == (True, False, 2)
    assert build.progress == (1, 2, "block 1 of two")
    assert not EngineBuild(fleet, lambda: None).run(None, None, lambda: True)()


def test_a_build_ends_when_another_bundle_is_offered():
    fleet = Fleet()
    with pytest.raises(BundleError, match="another bundle was offered"):
        EngineBuild(fleet, lambda: None).run(None, FILE, lambda: len(fleet.did) < 1)
    assert fleet.did == ["built 0"]


class Record:
    """A store whose first writes fail."""

    def __init__(self, failures):
        self.failures, self.is_confirmed, self.record = failures, False, self
        self.active = "new"

    def confirm(self, manifest):
        assert manifest == self.active
        if self.failures:
            self.failures -= 1
            raise BundleError("disk full")
        self.is_confirmed = True


def test_a_trial_ends_when_the_record_says_that_the_bundle_was_warm(thread, wait_until, monkeypatch):
    monkeypatch.setattr("ls_edge.runtime.store.jobs.AGAIN_S", 0.0)
    said = []
    trial = Trial(Record(failures=2), thread, said.append)
    trial.begin(None)
    assert trial.due is None  # nothing is served
    trial.begin("new")
    for expected in (["disk full"], ["disk full"] * 2, ["disk full", "disk full", ""]):
        trial.settle()
        handled(thread, wait_until)
        assert said == expected
    assert trial.due is None
    assert NO_PROGRESS == (0, 0, "")


def test_a_bundle_that_is_no_longer_active_is_not_recorded(thread):
    store = Record(failures=0)
    trial = Trial(store, thread, lambda _: None)
    trial.begin("old")
    trial.settle()
    thread.close()
    assert not store.is_confirmed
