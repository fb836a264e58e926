"""Grids of simulations: all combinations, seeds that count together, and a file that continues."""

import gc
import itertools
import weakref
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from ls_edge.core.errors import UsageError
from ls_edge.evaluation.simulation_summary import FleetSettings, SweepDocument
from ls_edge.runtime.fleet.simulation import sweep
from ls_edge.runtime.fleet.simulation.sites import simulation_context, sites_of
from ls_edge.runtime.fleet.simulation.sweep import (
    combinations,
    continued,
    parse_sweep,
    run_sweep,
)
from ls_edge.runtime.simulator.churn import Churn
from ls_edge.runtime.simulator.traces import Trace


@pytest.fixture
def prepare(make_problem):
    """Return the sites of two boards with so many replicas and requests."""

    def run(values):
        settings = FleetSettings(
            devices=2, requests=int(values["requests"]), rate=20.0, replicas=int(values["replicas"]), budget_ms=100.0
        )
        sites, _ = sites_of(make_problem(2.0, capacity=4), settings, churn=[Churn(2.0, 0.5)])
        return (sites, simulation_context(sites, bundle_id="bundle", churn=["up=2s,down=500ms"], assumptions=()))

    return lambda sweep=SWEEP: [run(values) for values in combinations(sweep)]


SWEEP = {"replicas": ["1", "2"], "requests": ["20", "40"]}


def test_each_combination_has_a_cell_in_which_all_seeds_count(prepare, tmp_path):
    path = tmp_path / "sweep.json"
    found = run_sweep(SweepDocument(SWEEP, 3, "", []), prepare(), path=path)
    assert [cell.values for cell in found.cells] == [
        dict(zip(SWEEP, values, strict=True)) for values in itertools.product(*SWEEP.values())
    ]
    assert [cell.summary.requests for cell in found.cells] == [60, 120, 60, 120]
    assert {(cell.summary.sites, cell.summary.profiles["a"].devices) for cell in found.cells} == {(1, 2)}
    hours = [cell.summary.whole_share.hours for cell in found.cells]
    assert hours[1] == pytest.approx(6 / 3600, rel=0.4), "120 requests, 20 a second"
    assert msgspec.json.decode(path.read_bytes(), type=SweepDocument) == found
    with ThreadPoolExecutor(2) as threads:
        assert run_sweep(SweepDocument(SWEEP, 3, "", []), prepare(), executor=threads) == found


def test_each_seed_begins_a_trace_at_a_time_of_its_own(make_problem):
    """All of them saw its first 40 of 100 s, in which nothing was lost, and counted that as 20 times as sure."""
    trace = Trace((((0.0, "up"), (50.0, "kill"), (56.0, "up")),), 100.0, 6.0)
    settings = FleetSettings(devices=1, requests=40, rate=1.0, outage_s=6.0, budget_ms=500.0)
    sites, _ = sites_of(make_problem(0.0), settings, churn=[trace])
    context = simulation_context(sites, bundle_id="bundle", churn=["trace.csv"], assumptions=())
    found = run_sweep(SweepDocument({"requests": ["40"]}, 20, "", []), [(sites, context)]).cells[0].summary
    assert found.whole_share.outages > 1
    assert found.whole_share.low < 0.94 < found.whole_share.high


def test_a_file_continues_with_what_it_lacks(prepare, tmp_path):
    path = tmp_path / "sweep.json"
    asked = SweepDocument(SWEEP, 1, "same", [])
    found = run_sweep(asked, prepare(), path=path)
    marked = msgspec.structs.replace(found.cells[0].summary, retries=12345)
    kept = [msgspec.structs.replace(found.cells[0], summary=marked), found.cells[2]]
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(found, cells=kept)))
    again = run_sweep(continued(asked, path), prepare(), path=path)
    assert again.cells[0].summary.retries == 12345, "not simulated again"
    assert again.cells[1:] == found.cells[1:]
    swapped = msgspec.structs.replace(asked, sweep=dict(reversed(SWEEP.items())))
    assert len(continued(swapped, path).cells) == 4
    with pytest.raises(UsageError, match="has results of replicas=2, requests=20, which would be lost"):
        continued(msgspec.structs.replace(asked, sweep=SWEEP | {"replicas": ["1"]}), path)
    with pytest.raises(UsageError, match="is a sweep with other settings; name another file"):
        continued(msgspec.structs.replace(asked, settings="other"), path)
    path.write_text("{}")
    with pytest.raises(UsageError, match="is not a sweep that can be continued"):
        continued(asked, path)


def test_an_interrupted_file_keeps_the_cells_that_it_had(prepare, tmp_path):
    path = tmp_path / "sweep.json"
    asked = SweepDocument(SWEEP, 1, "same", [])
    found = run_sweep(asked, prepare())
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(found, cells=found.cells[3:])))

    def interrupt(number, _total):
        if number:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(continued(asked, path), prepare(), path=path, on_step=interrupt)
    assert msgspec.json.decode(path.read_bytes(), type=SweepDocument).cells == [found.cells[0], found.cells[3]]


def test_outcomes_of_counted_combinations_are_not_kept(prepare, monkeypatch):
    """A grid of large fleets would fill the memory."""
    seen, alive = [], []

    def look(_done, _total):
        gc.collect()  # the processes of a simulation refer to each other
        alive.append([one() is not None for one in seen])

    summarize = sweep.summarize_simulation

    def watch(outcomes, context):
        seen.append(weakref.ref(outcomes[0]))
        return summarize(outcomes, context)

    monkeypatch.setattr(sweep, "summarize_simulation", watch)
    with ThreadPoolExecutor(1) as threads:
        run_sweep(SweepDocument(SWEEP, 1, "", []), prepare(), executor=threads, on_step=look)
    assert alive[:4] == [[False] * number for number in range(4)]


def test_more_requests_than_a_simulation_may_have_are_refused(prepare, monkeypatch):
    monkeypatch.setattr(sweep, "MOST_REQUESTS", 100)
    with pytest.raises(UsageError, match="--seeds 3 gives a combination 120 requests; at most 100 are simulated"):
        run_sweep(SweepDocument(SWEEP, 3, "", []), prepare())


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["replica=1"], "--sweep 'replica=1' cannot be read; write KEY=A,B"),
        (["up"], "cannot be read"),
        (["up=1m,,2m"], "cannot be read"),
        (["up=1m,1m"], "with different values"),
        (["up=1m", "up=2m"], "--sweep lists up twice"),
        ([f"up={','.join(map(str, range(40)))}", f"replicas={','.join(map(str, range(40)))}"], "1,600 combinations"),
    ],
)
def test_unusable_grids_are_refused(texts, message):
    with pytest.raises(UsageError, match=message):
        parse_sweep(texts, ["replicas", "up"])
