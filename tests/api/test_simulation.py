"""``ls_edge.simulate``: the numbers of the command."""

import json

import msgspec
import pytest

import ls_edge
from ls_edge.core.bundle import Bundle
from ls_edge.device.sensors import Sensors
from ls_edge.engines.profiling import MeasuredDevice, profile_bundle


@pytest.fixture(scope="module")
def profile(tiny_bundle, tmp_path_factory):
    """A profile of a device called ``board``."""
    folder = tmp_path_factory.mktemp("profiles")
    device = MeasuredDevice("board", Sensors(folder / "none"))
    path = folder / "board.json"
    path.write_bytes(msgspec.json.encode(profile_bundle(Bundle.open(tiny_bundle), device, duration=0.02, threads=1)))
    return str(path)


def test_a_fleet_matches_the_command(command, tiny_bundle, profile):
    steps = []
    asked = {"devices": 20, "requests": 40, "rate": 20.0, "churn": "up=2s,down=500ms"}
    found = ls_edge.simulate(tiny_bundle, [profile], **asked, on_progress=lambda *step: steps.append(step))
    flags = [word for name, value in asked.items() for word in (f"--{name}", value)]
    _, printed, errors = command("simulate", "--bundle", tiny_bundle, "--profiles", profile, *flags, "--json")
    assert json.loads(msgspec.json.encode(found)) == json.loads(printed), errors
    assert (found.sites, steps[-1]) == (2, (40, 40, "requests"))
    assert "of the requests get a complete answer" in str(found)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replica": 2}, "unknown key 'replica'; did you mean 'replicas'?"),
        ({"mbit": 0}, "mbit is 0; it has to be a number above 0"),
        ({"policy": "best"}, "unknown policy 'best'"),
        ({"requests": 0}, "requests is 0; it has to be a whole number from 1 to 10000000"),
    ],
)
def test_unusable_settings_are_named(tiny_bundle, profile, settings, message):
    with pytest.raises(ls_edge.UsageError) as caught:
        ls_edge.simulate(tiny_bundle, [profile], **{"devices": 2, "requests": 2, **settings})
    assert message in str(caught.value)
