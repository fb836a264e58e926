"""``profile.json``: a measured profile survives its file, and invalid documents are explained."""

import json

import msgspec
import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import DataError
from ls_edge.device.profile import load_profile
from ls_edge.device.sensors import Sensors
from ls_edge.engines.profiling import MeasuredDevice, profile_bundle


@pytest.fixture(scope="module")
def found(tiny_bundle, tmp_path_factory):
    """A profile of the tiny bundle, on a device without sensors."""
    device = MeasuredDevice("here", Sensors(tmp_path_factory.mktemp("none")))
    return profile_bundle(Bundle.open(tiny_bundle), device, duration=0.02, threads=1)


def test_a_profile_survives_its_file(found, tmp_path):
    path = tmp_path / "profile.json"
    path.write_bytes(msgspec.json.encode(found))
    assert load_profile(path) == found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, "has schema 2, not 1: made by a newer ls-edge; make it with"),
        ({"batch": {}}, "batch is a group of keys; it has to be a group of batch sizes"),
        ({"batch": {"x": None}}, "batch"),
        ({"batch": {"1": {"stem_ms": {"p50": 1e308}}}}, r"p50 is 1e\+308; .* to 1000000000 \(at batch.1.stem_ms.p50\)"),
        ({"power_channels": {"a": 1, "b": "x"}}, r"b is 'x'; it has to be a number \(at power_channels.b\)"),
        ({"memory_bytes": -1}, "memory_bytes is -1; it has to be a whole number from 0"),
        ({"threads": "many"}, "threads"),
        ({"parts": []}, "parts lists no block"),
    ],
)
def test_invalid_profiles_are_explained(found, tmp_path, changes, message):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(msgspec.to_builtins(found) | changes), encoding="utf-8")
    with pytest.raises(DataError, match=message):
        load_profile(path)


@pytest.mark.parametrize("count", ["x", "02", "0", "-1"])
def test_visits_are_counted_in_whole_numbers(found, tmp_path, count):
    document = msgspec.to_builtins(found)
    visits = document["batch"]["1"]["visits_ms"]
    visits[count] = visits["1"]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(DataError, match=r"profile\.json.*visits_ms"):
        load_profile(path)


def test_missing_and_invalid_files_are_refused_with_advice(tmp_path):
    with pytest.raises(DataError, match="No such file or directory; make it with 'ls-edge bench"):
        load_profile(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("hello", encoding="utf-8")
    with pytest.raises(DataError, match="not JSON"):
        load_profile(tmp_path / "text.json")
