"""Churn: parsed from text, and applied to simulated devices."""

import math
import random

import pytest

from ls_edge.core.errors import UsageError
from ls_edge.runtime.routing.state.events import Complete, Fail
from ls_edge.runtime.simulator.churn import Churn, ChurnProcess
from ls_edge.runtime.simulator.simulation import Simulation


def test_churn_is_parsed():
    assert Churn.parse("up=10m,down=30s") == Churn(600.0, 30.0)
    assert Churn.parse("up=1.5h, down=500ms") == Churn(5400.0, 0.5)


@pytest.mark.parametrize(
    "text", ["", "up=10m", "down=1s,up=2s", "up=10,down=1s", "up=0s,down=1s", "up=1.2.3s,down=1s", "up=9999h,down=1s"]
)
def test_invalid_churn_is_refused(text):
    with pytest.raises(UsageError, match=r"has no times from 1ms to 8784h; write up=10m,down=30s"):
        Churn.parse(text)


def test_devices_are_up_for_their_share_of_the_time():
    """Up three times as long as down."""
    names = "abcdefgh"
    sim = Simulation(dict.fromkeys(names, (0,)), blocks=1)
    churn = ChurnProcess(sim, Churn(3.0, 1.0), names, random.Random(0))
    up = [len(names) - len(churn.down)]
    while sim.now < 60:
        sim.run(0.1)
        up.append(len(names) - len(churn.down))
        assert up[-1] == len(names) + sum(change for _, change in churn.changes)
    assert sum(up) / len(up) / len(names) == pytest.approx(0.75, abs=0.08)


def test_the_share_of_devices_that_are_up_at_first_is_that_of_the_long_run():
    names = [f"d{number}" for number in range(60)]  # a full mesh, so four times the devices cost 16 times as much
    churn = ChurnProcess(Simulation(dict.fromkeys(names, (0,)), blocks=1), Churn(30.0, 10.0), names, random.Random(0))
    assert 1 - len(churn.down) / len(names) == pytest.approx(0.75, abs=4 * math.sqrt(0.75 * 0.25 / len(names)))


def test_a_device_answers_unless_it_is_lost():
    sim = Simulation({"a": (0,)}, blocks=1)
    churn = ChurnProcess(sim, Churn(5.0, 5.0), ["a"], random.Random(3))
    seen = {True: 0, False: 0}
    while min(seen.values()) < 5:
        is_down, changes = "a" in churn.down, len(churn.changes)
        sim.run(0.1)  # a peer that returns greets first
        request = sim.submit(budget=0.3)
        sim.run(0.5)
        if len(churn.changes) == changes:
            assert isinstance(sim.outcomes[request][0], Fail if is_down else Complete)
            seen[is_down] += 1
