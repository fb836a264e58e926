"""Churn: parsed from text, and applied to simulated devices."""

import itertools
import math
import random

import pytest

from ls_edge.core.errors import UsageError
from ls_edge.runtime.routing.state.events import Complete, Fail
from ls_edge.runtime.simulator.churn import LOSSES, Battery, Churn, ChurnProcess
from ls_edge.runtime.simulator.network import Clock
from ls_edge.runtime.simulator.simulation import Simulation


@pytest.mark.parametrize(
    ("text", "churn"),
    [
        ("up=10m,down=30s", Churn(600.0, 30.0, {"kill": 1.0})),
        ("up=1m,down=1s,shape=0.7", Churn(60.0, 1.0, shape=0.7)),
        ("up=2h,down=9m,zone=4,stop=1", Churn(7200.0, 540.0, {"stop": 1.0}, zone=4)),
        ("up=1h,down=5m,slow=1,times=2.5", Churn(3600.0, 300.0, {"slow": 1.0}, times=2.5)),
        ("of=source,up=90h,down=5m", Churn(324_000.0, 300.0, is_source=True)),
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
        ("up=1m,down=1s,kill=-1", "kill '-1' is not a number from 0 to 9999"),
        ("up=1m,down=1s,kill=nan", "kill 'nan' is not a number from 0 to 9999"),
        ("up=1m,down=1s,kill=0", "all weights are 0"),
        ("up=1m,down=1s,shape=0", "shape '0' is not a number from 0.2 to 10"),
        ("up=1m,down=1s,shape=inf", "shape 'inf' is not a number"),
        ("up=1m,down=1s,zone=0", "zone '0' is not a number from 1 to 1000"),
        ("up=1m,down=1s,zone=1.5", "zone '1.5' is not a number"),
        ("up=1m,down=1s,slow=1,times=0.5", "times '0.5' is not a number from 1 to 1000"),
        ("up=1m,down=1s,times=5", "times is for slow devices; add slow=1, or leave times out"),
        ("up=1m,down=1s,slow=0,kill=1,times=5", "times is for slow devices"),
        ("up=1m,down=1s,of=board", "write of=source,up=90h,down=5m"),
        ("up=1m,down=1s,of=source,stop=1", "write of=source,up=90h,down=5m"),
        ("up=battery,down=1h,hang=1", "write up=battery,down=2h"),
    ],
)
def test_invalid_churn_is_refused(text, message):
    with pytest.raises(UsageError, match=message):
        Churn.parse(text)


DOWN = [kind for kind in LOSSES if kind != "slow"]


@pytest.mark.parametrize("kind", DOWN)
def test_devices_are_up_for_their_share_of_the_time(kind):
    """Up three times as long as down."""
    names = "abcdefgh"
    sim = Simulation(dict.fromkeys(names, (0,)), blocks=1)
    churn = ChurnProcess(sim, [Churn(3.0, 1.0, {kind: 1.0})], names, random.Random(0))
    up = [len(names) - len(churn.down)]
    while sim.now < 60:
        sim.run(0.1)
        up.append(len(names) - len(churn.down))
        assert up[-1] == len(names) + sum(change for *_, change in churn.changes)
    assert sum(up) / len(up) / len(names) == pytest.approx(0.75, abs=0.08)
    assert churn.losses == {kind: sum(change < 0 for *_, change in churn.changes)}


def test_the_share_of_devices_that_are_up_at_first_is_that_of_the_long_run():
    names = [f"d{number}" for number in range(60)]  # a full mesh, so four times the devices cost 16 times as much
    churn = ChurnProcess(Simulation(dict.fromkeys(names, (0,)), blocks=1), [Churn(30.0, 10.0)], names, random.Random(0))
    assert 1 - len(churn.down) / len(names) == pytest.approx(0.75, abs=4 * math.sqrt(0.75 * 0.25 / len(names)))


@pytest.mark.parametrize("kind", DOWN)
def test_a_device_answers_unless_it_is_lost(kind):
    sim = Simulation({"a": (0,)}, blocks=1)
    churn = ChurnProcess(sim, [Churn(5.0, 5.0, {kind: 1.0})], ["a"], random.Random(3))
    seen = {True: 0, False: 0}
    while min(seen.values()) < 5:
        is_down, changes = "a" in churn.down, len(churn.changes)
        sim.run(0.1)  # a peer that returns greets first
        request = sim.submit(budget=0.3)
        sim.run(0.5)
        if len(churn.changes) == changes:
            assert isinstance(sim.outcomes[request][0], Fail if is_down else Complete)
            seen[is_down] += 1


@pytest.mark.parametrize("shape", [0.5, 1.0, 3.0])
def test_times_up_have_their_mean_whatever_their_shape_from_the_start(shape):
    """Of 400 devices with 9 s up and 1 s down, a share of 1 s / 10 s is lost in each second, also in the first: new
    devices of shape 0.5 would lose 135."""
    names = [f"d{number}" for number in range(400)]
    sim = Still(names)
    churn = ChurnProcess(sim, [Churn(9.0, 1.0, shape=shape)], names, random.Random(1))
    lost = len(churn.down)
    assert lost == pytest.approx(40, abs=20)
    for second in range(1, 41):
        sim.run(1.0)
        now = sum(change < 0 for *_, change in churn.changes)
        if second == 1:
            assert now - lost == pytest.approx(40, abs=20)
    assert now == pytest.approx(40 + 40 * 40, rel=0.06 if shape >= 1 else 0.16)


def test_devices_of_a_zone_are_lost_together_and_also_alone():
    """A device is up if its zone is and it has no loss of its own: 0.9 * 0.8."""
    names = [f"d{number}" for number in range(40)]
    sim = Still(names)
    churn = ChurnProcess(sim, [Churn(9.0, 1.0), Churn(40.0, 10.0, zone=4)], names, random.Random(2))
    up, together = [], 0
    for _ in range(2000):
        sim.run(0.5)
        up.append(len(names) - len(churn.down))
        together += sum(all(name in churn.down for name in names[at : at + 4]) for at in range(0, 40, 4))
        assert {name for name in names if not sim.is_up[name]} == set(churn.down)
    assert sum(up) / 2000 / 40 == pytest.approx(0.72, abs=0.04)
    assert together / 2000 / 10 == pytest.approx(0.2, abs=0.05), "independent devices would be in 0.6 % of cases"


def test_a_slow_device_takes_longer_and_is_not_down():
    sim = Simulation({"a": (0,)}, blocks=1, block_seconds=0.01)
    churn = ChurnProcess(sim, [Churn(5.0, 5.0, {"slow": 1.0}, times=4.0)], ["a"], random.Random(1))
    seen = set()
    while len(seen) < 2:
        sim.run(1.0)
        before, pace = sim.busy["a"], sim.slowness["a"]
        sim.submit(budget=1.0)
        sim.run(0.2)
        if sim.slowness["a"] == pace:
            assert sim.busy["a"] - before == pytest.approx(0.01 * pace)
            seen.add(pace)
    assert seen == {1.0, 4.0}
    assert not churn.down
    assert not churn.changes
    assert churn.losses["slow"] > 0


def test_a_battery_lasts_as_long_as_its_device_consumes():
    """3,600 J at 1 W are an hour idle, and at 4 W while it computes a quarter of one; charging takes 10 minutes."""
    sim = Still(["idle", "busy"])
    sim.busy = {"idle": 0.0, "busy": 0.0}
    batteries = dict.fromkeys(sim.busy, Battery(3600.0, 1.0, 4.0))
    churn = ChurnProcess(sim, [Churn(math.nan, 600.0)], list(sim.busy), random.Random(0), batteries=batteries)
    lost = []
    go_down = churn._go_down
    churn._go_down = lambda name, *more: (lost.append((sim.now, name)), go_down(name, *more))
    for _ in range(20_000):
        sim.run(1.0)
        sim.busy["busy"] += sim.is_up["busy"]
    for name, lasts in {"idle": 3600.0, "busy": 900.0}.items():
        times = [at for at, who in lost if who == name]
        gaps = [after - before for before, after in itertools.pairwise(times)]
        assert gaps == pytest.approx([lasts + 600.0] * len(gaps), abs=10)
        assert len(gaps) > 2


class Still(Clock):
    """Devices that are only killed and restarted, in simulated time; refuses both where they make no sense."""

    def __init__(self, names):
        super().__init__()
        self.is_up = dict.fromkeys(names, True)

    def kill(self, name):
        assert self.is_up[name]
        self.is_up[name] = False

    def restart(self, name):
        assert not self.is_up[name]
        self.is_up[name] = True
