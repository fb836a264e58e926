"""What all tests share: one thread a process, settled random examples, and a watch for leaks."""

import gc
import os
import sys
import threading
import time

import pytest
from hypothesis import HealthCheck, settings

# Read by torch and numpy when they are first imported, here and in the processes that tests start.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"

# ONNX Runtime would keep a store of events in the user's home and send it to its maker.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

# The same examples in each run; HYPOTHESIS_PROFILE=explore looks for new ones.
_quiet = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("settled", derandomize=True, **_quiet)
settings.register_profile("explore", max_examples=2000, **_quiet)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "settled"))

GRACE_S = 3.0
"""How long threads and descriptors may take to go after a test."""


def pytest_configure(config):
    config.addinivalue_line("markers", "leaks_ok(reason): what the test starts lives on for good")


@pytest.fixture(autouse=True)
def no_leaks(request):
    """Fail a test that leaves threads or open files, sockets and pipes behind."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    threads, descriptors = _threads(), _descriptors()
    yield
    if request.node.get_closest_marker("leaks_ok"):
        return
    until = time.monotonic() + GRACE_S
    while left := _left(threads, descriptors):
        gc.collect()
        if time.monotonic() > until:
            pytest.fail("left behind: " + ", ".join(left))
        time.sleep(0.02)


def _left(threads, descriptors):
    new_threads = [f"thread {thread.name!r}" for thread in _threads() - threads]
    return new_threads + [f"descriptor {what}" for fd, what in _descriptors().items() if descriptors.get(fd) != what]


def _threads():
    return {thread for thread in threading.enumerate() if thread.is_alive()}


def _descriptors():
    """Open descriptors and what they are, devices left out (libraries keep those); empty where there is no /proc."""
    found = {}
    try:
        descriptors = os.listdir("/proc/self/fd")
    except OSError:
        return found
    for descriptor in descriptors:
        try:
            what = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:  # the one that listed them
            continue
        if not what.startswith(("/dev/", "/proc/", "/sys/")):
            found[int(descriptor)] = what
    return found
