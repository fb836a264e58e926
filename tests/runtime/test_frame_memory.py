"""The memory of tokens is reused, and not returned to the system after each frame."""

import platform
import subprocess
import sys

import pytest

COUNT_FAULTS = """
import resource, sys
from ls_edge.core.peers_file import HeartbeatSettings
from ls_edge.runtime.transport.links import Links

def faults(rounds):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        held = [bytes(605_184 + index) for index in range(4)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "links":
    Links({}, bind=None, heartbeat=HeartbeatSettings(), max_frame=1 << 20)
faults(5)
print(faults(100) / 400)
"""


def faults_per_frame(what):
    found = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS, what], capture_output=True, check=True, text=True, timeout=60
    )
    return float(found.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt's parameters are those of glibc")
def test_a_process_with_links_reuses_the_memory_of_frames():
    assert faults_per_frame("links") < 1
    assert faults_per_frame("none") > 5  # otherwise the test shows nothing, and the call is not needed any more
