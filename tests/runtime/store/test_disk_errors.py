"""A peer whose disk or kernel returns an error to one call of a push serves a complete bundle after its next start."""

import contextlib
import itertools
import shutil
import subprocess

import pytest
import zmq

from ls_edge.core.bundle import MANIFEST, Bundle
from ls_edge.core.errors import LsEdgeError
from ls_edge.runtime.clients.status import Observer
from ls_edge.runtime.fleet.local_cluster import LocalCluster
from ls_edge.runtime.store.files import digest_of
from ls_edge.runtime.transport.keys import load_secret
from tests.faults.applying import give

pytestmark = [
    pytest.mark.release,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("strace") is None or not zmq.has("curve"), reason="needs strace and CURVE"),
]
CALLS = [
    ("openat", "EIO"), ("read", "EIO"), ("newfstatat", "EACCES"), ("openat", "EMFILE"), ("fsync", "EIO"),
    ("openat", "ENOMEM"), ("rename", "EIO"), ("unlink", "EIO"),
]  # fmt: skip
"""Calls, and errors that they return."""


def digests(folder):
    parts = [part.sha256 for _, part in Bundle.open(folder).manifest.part_names()]
    return [digest_of(folder / MANIFEST), *parts]


@contextlib.contextmanager
def fault(process, store, names, call, error, when):
    """Let the ``when``-th call of a process that concerns the store return an error."""
    paths = [store / "store.json", store / "files", store]
    paths += [store / "files" / f"{name}{ending}" for name in names for ending in ("", ".part")]
    words = [
        "strace",
        "-f",
        "-p",
        str(process),
        "-e",
        f"trace={call}",
        "-e",
        f"inject={call}:error={error}:when={when}",
    ]
    words += [word for path in paths for word in ("-P", str(path))]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as strace:
        if "attached" not in (line := strace.stderr.readline()):
            pytest.skip(f"strace cannot attach to a process here: {line}")
        try:
            yield
        finally:
            strace.terminate()
            strace.stderr.read()


def served(peers):
    with Observer(peers.file, keys=load_secret(peers.secret_key("laptop"))) as observer:
        observer.wait_until(lambda: observer.view()["a"].state == "alive", 60.0)
        return observer.look(1.0)["a"]


def test_after_an_error_of_one_call_a_complete_bundle_is_served(tmp_path, tiny_bundle, half_bundle):
    ids = {Bundle.open(bundle).manifest.bundle_id for bundle in (tiny_bundle, half_bundle)}
    names = {*digests(tiny_bundle), *digests(half_bundle)}
    bundles = itertools.cycle((half_bundle, tiny_bundle))
    with LocalCluster(
        tmp_path / "fleet", tiny_bundle, {"a": "0-5"}, sources=["laptop"], keys=True, stores=True
    ) as peers:
        give(peers.file, tiny_bundle, peers.secret_key("laptop"))
        for (call, error), when in zip(CALLS, itertools.cycle((1, 2, 4)), strict=False):
            bundle = next(bundles)
            with (
                fault(peers.processes["a"].pid, peers.store("a"), names, call, error, when),
                contextlib.suppress(LsEdgeError),
            ):
                give(peers.file, bundle, peers.secret_key("laptop"))
            peers.kill("a")
            peers.start("a")
            found = served(peers)
            assert (found.bundle_id in ids, found.blocks) == (True, tuple(range(6))), (call, when, found.reason)
