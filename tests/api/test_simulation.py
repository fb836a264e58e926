"""``ls_edge.simulate``: the numbers of the command, on any executor."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from PIL import Image

import ls_edge
from ls_edge.api.comparison import side_by_side
from ls_edge.core.bundle import Bundle
from ls_edge.device.sensors import Sensors
from ls_edge.engines.pipeline import Pipeline
from ls_edge.engines.profiling import MeasuredDevice, profile_bundle

CHURN = {"churn": "up=2s,down=500ms", "rate": 20.0, "budget_ms": 100.0, "max_skips": 0}


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
    found = ls_edge.simulate(
        tiny_bundle,
        [profile],
        devices=4,
        requests=40,
        site_size=2,
        **CHURN,
        on_progress=lambda *step: steps.append(step),
    )
    flags = ("--churn", CHURN["churn"], "--rate", 20, "--budget-ms", 100, "--max-skips", 0, "--site-size", 2)
    _, printed, errors = command(
        "simulate", "--bundle", tiny_bundle, "--profiles", profile, "--devices", 4, "--requests", 40, *flags,
        "--jobs", 1, "--json",
    )  # fmt: skip
    assert json.loads(msgspec.json.encode(found)) == json.loads(printed), errors
    assert steps[-1] == (40, 40, "requests")
    assert "of the requests get a whole answer" in str(found)


def test_a_grid_gives_the_same_on_any_executor(tiny_bundle, profile):
    grid = {"replicas": [1, 2], "up": ["2s", "1h"]}

    def run(executor=None, grid=grid, **more):
        return ls_edge.simulate(
            tiny_bundle, [profile], devices=2, requests=20, **CHURN, sweep=grid, seeds=2, executor=executor, **more
        )

    found = run()
    assert [cell.values for cell in found.cells][1] == {"replicas": "1", "up": "1h"}
    assert {cell.summary.requests for cell in found.cells} == {40}
    holders = [sum(0 in parts for parts in cell.summary.placement.values()) for cell in found.cells]
    assert holders == [1, 1, 2, 2]
    assert run(max_replicas=2).cells[0].summary.placement == found.cells[2].summary.placement
    with ThreadPoolExecutor(2) as threads:
        assert run(threads) == found
    assert "replicas" in str(found)
    assert run(grid={"up": "2s,1h", "replicas": 2}).cells[1].summary == found.cells[3].summary


def test_a_sample_of_the_orders_runs_on_images(tiny_bundle, profile, monkeypatch, tmp_path):
    """The orders that run are those of answers, skipped blocks included, and the accuracy is that of the engines."""
    ran = []
    forward = Pipeline.forward

    def watched(self, images, order):
        ran.append(order)
        return forward(self, images, order)

    monkeypatch.setattr(Pipeline, "forward", watched)
    settings = {"devices": 4, "requests": 60, "site_size": 2, "policy": "random", **CHURN, "max_skips": 2, "seed": 3}
    usual = ls_edge.simulate(tiny_bundle, [profile], **settings)
    assert (usual.top1, usual.executed, ran) == (None, 0, [])
    found = ls_edge.simulate(tiny_bundle, [profile], **settings, execute=12, data="digits")
    assert found.executed == len(ran) == 12
    assert 0 <= found.top1_interval.low <= found.top1 <= found.top1_interval.high <= 1
    assert found.top1 * 12 == pytest.approx(round(found.top1 * 12))
    assert len(set(ran)) > 6, "random orders"
    assert (found.answered, found.latency_ms) == (usual.answered, usual.latency_ms), "sampling changes no course"
    assert "of 12 orders that ran" in str(found)
    (tmp_path / "found.json").write_bytes(msgspec.json.encode(found))
    assert side_by_side([tmp_path / "found.json"]).rows[0].accuracy == found.top1


def test_images_without_the_classes_of_the_model_are_refused_before_the_simulation(tiny_bundle, profile, tmp_path):
    (tmp_path / "other").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "other" / "a.png")
    steps = []
    asked = {"execute": 1, "data": str(tmp_path), "on_progress": lambda *step: steps.append(step)}
    with pytest.raises(ls_edge.LsEdgeError, match="the model has no class 'other'"):
        ls_edge.simulate(tiny_bundle, [profile], devices=2, requests=5, **asked)
    assert not steps


@pytest.mark.release
@pytest.mark.leaks_ok("Dask keeps threads and sockets for a while")
def test_a_grid_runs_on_a_local_dask_cluster(tiny_bundle, profile):
    """A worker that is killed after the first combination changes nothing."""
    distributed = pytest.importorskip("distributed", reason="Dask is not installed")
    asked = {"devices": 4, "requests": 40, "site_size": 2, "sweep": {"replicas": [1, 2]}, "seeds": 2, **CHURN}
    cluster = distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
    with cluster, distributed.Client(cluster) as client:
        workers = list(client.run(os.getpid).values())

        def kill_one(done, _total, _text):
            if done == 1:
                os.kill(workers.pop(), signal.SIGKILL)

        found = ls_edge.simulate(tiny_bundle, [profile], **asked, executor=client.get_executor(), on_progress=kill_one)
        assert len(workers) == 1
    assert found == ls_edge.simulate(tiny_bundle, [profile], **asked)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replica": 2}, "unknown key 'replica'; did you mean 'replicas'?"),
        ({"mbit": 0}, "mbit is 0; it has to be a number above 0"),
        ({"policy": "best"}, "unknown policy 'best'"),
        ({"seeds": 0, "sweep": {"replicas": [1]}}, "seeds is 0; it has to be a whole number from 1 to 1000"),
        ({"until": 2.0}, "until is 2.0; it has to be a number above 0 below 1"),
        ({"execute": 99_999, "data": "digits"}, "--execute 99999 needs as many images, digits has "),
        ({"execute": 5}, "give both --execute N and --data DATA"),
        ({"sweep": {"seed": [1, 2]}}, "--sweep 'seed=1,2' cannot be read"),
    ],
)
def test_unusable_settings_are_named(tiny_bundle, profile, settings, message):
    with pytest.raises(ls_edge.UsageError) as caught:
        ls_edge.simulate(tiny_bundle, [profile], **{"devices": 2, "requests": 2, **settings})
    assert message in str(caught.value)
