"""A profile of this machine, measured once for all tests."""

import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.device.sensors import Sensors
from ls_edge.engines.profiling import MeasuredDevice, profile_bundle


@pytest.fixture(scope="session")
def measured(bundle, tmp_path_factory):
    """A profile of this machine without sensors; tests change its times to those of boards."""
    device = MeasuredDevice("here", Sensors(tmp_path_factory.mktemp("none")))
    return profile_bundle(Bundle.open(bundle), device, duration=0.02, threads=1)
