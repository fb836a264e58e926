"""Three tiers of tests: ``unit``, ``processes`` and ``release``; every test is of one.

A test of ``unit`` starts no process and opens no socket. A test of ``processes`` does, in seconds. Those of
``release`` try the documents, examples, packages, benchmarks and tools of others, or take long.

Folders and files stand in :data:`PLACES`, and a marker of a module, a test or a parameter says otherwise.
"""

import contextlib
import sys
from pathlib import Path

import zmq

TIERS = ("unit", "processes", "release")
FOLDER = Path(__file__).parent
PLACES = {
    "benchmarks": "release",
    "cli": "processes",
    "conformance": "release",
    "data/test_camera.py": "processes",
    "data/test_decoding.py": "processes",
    "device/test_facts.py": "processes",
    "docs": "release",
    "engines/cuda": "release",
    "engines/tensorrt": "release",
    "engines/test_board_numbers.py": "processes",
    "engines/test_diagnostics.py": "processes",
    "examples": "release",
    "report/test_pages_in_browser.py": "release",
    "runtime/clients": "processes",
    "runtime/clusters": "processes",
    "runtime/fleet/test_local_cluster.py": "processes",
    "runtime/peer": "processes",
    "runtime/serve": "processes",
    "runtime/source": "processes",
    "runtime/store": "processes",
    "runtime/transport": "processes",
    "test_community_files.py": "processes",
    "test_floors.py": "processes",
    "test_packaging.py": "release",
}
"""Tier of each folder or file that is not ``unit``; the longest path counts."""
FIXTURES = {
    "browser": "release",
    "doubles": "release",
    "ls_edge": "processes",
    "ls_edge_of_module": "processes",
    "open_source": "processes",
    "peers": "processes",
    "process": "processes",
    "serve_peers": "processes",
    "start_peers": "processes",
}
"""Tier of each test with one of these fixtures, if that of its place comes earlier."""
_EVENTS = {"subprocess.Popen", "os.fork", "os.posix_spawn", "socket.connect", "zmq.bind", "zmq.connect"}
_started = None
"""Processes and sockets of the test of ``unit`` that runs."""


def tier_of(item):
    """Return the tier of a test: that of its nearest marker, else the last of its place and its fixtures."""
    for marker in item.iter_markers():
        if marker.name in TIERS:
            return marker.name
    path = item.path.relative_to(FOLDER)
    places = ("/".join(path.parts[:count]) for count in range(len(path.parts), 0, -1))
    place = next((PLACES[place] for place in places if place in PLACES), "unit")
    return max([place, *(FIXTURES[name] for name in item.fixturenames if name in FIXTURES)], key=TIERS.index)


def install():
    """Notice processes and sockets from now on."""
    sys.addaudithook(_notice)
    for name in ("bind", "connect"):
        setattr(zmq.Socket, name, _noticed(getattr(zmq.Socket, name)))


@contextlib.contextmanager
def watch():
    """Return the list of the processes and sockets that the block starts."""
    global _started
    _started = started = []
    try:
        yield started
    finally:
        _started = None


def _notice(event, arguments):
    # The first import of some libraries looks for others by ldconfig, in whichever test it happens.
    if _started is not None and event in _EVENTS and "ldconfig" not in str(arguments):
        _started.append(f"{event} {arguments!r:.80}")


def _noticed(call):
    def noticed(socket, address, *more, **named):
        if not str(address).startswith("inproc:"):
            sys.audit(f"zmq.{call.__name__}", address)
        return call(socket, address, *more, **named)

    return noticed
