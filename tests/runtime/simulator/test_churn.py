"""Churn: parsed from text, and applied to simulated devices."""

import math
import random

import pytest

from ls_edge.core.errors import UsageError
from ls_edge.runtime.routing.state.events import Complete, Fail
from ls_edge.runtime.simulator.churn import LOSSES, Churn, ChurnProcess
from ls_edge.runtime.simulator.simulation import Simulation


@pytest.mark.parametrize(
    ("text", "churn"),
    [
        ("up=10m,down=30s", Churn(600.0, 30.0, {"kill": 1.0})),
        ("down=500ms, up=1.5h,stop=1,hang=0,kill=0.5", Churn(5400.0, 0.5, {"stop": 1.0, "kill": 0.5})),
    ],
)
def test_churn_is_parsed(text, churn):
    assert Churn.parse(text) == churn


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' cannot be read; write up=10m,down=30s"),
        ("up=10m", "has no down"),
        ("up=10m,up=5m,down=1s", "has 'up' twice"),
        ("up=10,down=1s", "'10' is not a time"),
        ("up=0s,down=1s", "'0s' is not a time"),
        ("up=inf,down=1s", "'inf' is not a time"),
        ("up=9999999h,down=1s", "is not a time"),
        ("up=1m,down=1s,burn=1", "'burn=1' cannot be read"),
        ("up=1m,down=1s,kill=-1", "'-1' is not a weight of kill"),
        ("up=1m,down=1s,kill=nan", "'nan' is not a weight of kill"),
        ("up=1m,down=1s,kill=0", "all weights are 0"),
    ],
)
def test_invalid_churn_is_refused(text, message):
    with pytest.raises(UsageError, match=message):
        Churn.parse(text)


@pytest.mark.parametrize("kind", LOSSES)
def test_devices_are_up_for_their_share_of_the_time(kind):
    """Up three times as long as down."""
    names = "abcdefgh"
    sim = Simulation(dict.fromkeys(names, (0,)), blocks=1)
    churn = ChurnProcess(sim, Churn(3.0, 1.0, {kind: 1.0}), names, random.Random(0))
    up = [len(names) - len(churn.down)]
    while sim.now < 60:
        sim.run(0.1)
        up.append(len(names) - len(churn.down))
        assert up[-1] == len(names) + sum(change for _, change in churn.changes)
    assert sum(up) / len(up) / len(names) == pytest.approx(0.75, abs=0.08)
    assert churn.losses == {kind: sum(change < 0 for _, change in churn.changes)}


def test_the_share_of_devices_that_are_up_at_first_is_that_of_the_long_run():
    names = [f"d{number}" for number in range(150)]
    churn = ChurnProcess(Simulation(dict.fromkeys(names, (0,)), blocks=1), Churn(30.0, 10.0), names, random.Random(0))
    assert 1 - len(churn.down) / len(names) == pytest.approx(0.75, abs=4 * math.sqrt(0.75 * 0.25 / len(names)))


@pytest.mark.parametrize("kind", LOSSES)
def test_a_device_answers_unless_it_is_lost(kind):
    sim = Simulation({"a": (0,)}, blocks=1)
    churn = ChurnProcess(sim, Churn(5.0, 5.0, {kind: 1.0}), ["a"], random.Random(3))
    seen = {True: 0, False: 0}
    while min(seen.values()) < 5:
        is_down, changes = "a" in churn.down, len(churn.changes)
        sim.run(0.1)  # a peer that returns greets first
        request = sim.submit(budget=0.3)
        sim.run(0.5)
        if len(churn.changes) == changes:
            assert isinstance(sim.outcomes[request][0], Fail if is_down else Complete)
            seen[is_down] += 1
