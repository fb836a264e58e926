"""The smallest fleet that reaches a target, against closed forms of boards that hold the whole model."""

import dataclasses

import pytest

from ls_edge.core.errors import UsageError
from ls_edge.evaluation.simulation_summary import FleetSettings
from ls_edge.runtime.fleet.simulation.targets import Target, answer_text, search_fleets
from ls_edge.runtime.simulator.churn import Churn

CHURN = Churn(9.0, 1.0)
"""A board is down a tenth of the time."""


@pytest.fixture
def search(make_problem):
    """Return the fleets of one kind of board that are simulated for a target."""

    def run(*targets, capacity=4, **settings):
        (board,) = make_problem(2.0, capacity=capacity).devices
        problem = dataclasses.replace(make_problem(2.0), devices=(dataclasses.replace(board, loss=0.1),))
        asked = FleetSettings(
            **{"devices": 1, "requests": 1, "budget_ms": 100.0, "outage_s": CHURN.down, "seed": 1, **settings}
        )
        wanted = [Target.parse(text) for text in targets]
        found = search_fleets(problem, wanted, asked, [CHURN])
        return found, answer_text(wanted, found)

    return run


def test_boards_with_the_whole_model_are_as_many_as_the_formula_says(search):
    """One board answers 91 %, two 99.2 %: a target of 96 % needs two."""
    found, answer = search("96%")
    assert next((one.devices, one.replicas) for one in found if one.verdict == "met") == (2, 2)
    assert [one.verdict for one in found if one.devices == 1] == ["missed"]
    assert answer.startswith("2 devices with 2 copies of each block reach whole=0.96: ")
    for one in found:
        assert one.formula == pytest.approx(1 - (0.1 * 2.718281828**-0.1) ** one.replicas, rel=1e-6)
        assert one.whole.low <= one.formula <= one.whole.high
    assert sum(one.verdict == "met" for one in found) == 3


@pytest.mark.slow
def test_boards_with_room_for_half_of_the_model_are_twice_as_many(search):
    """Four boards: two holders of each half are whole with 98.2 %; two boards with a copy of each with 83 %."""
    found, answer = search("0.93", capacity=2)
    assert answer.startswith("4 devices with 2 copies of each block reach")
    assert all(len(blocks) == 2 for one in found if one.devices == 4 for blocks in one.placement.values())


def test_skipped_blocks_count_as_answers_but_not_as_whole_ones(search):
    found, _ = search("answered=0.95", capacity=2, max_skips=2)
    assert found[0].verdict == "met"
    assert found[0].devices == 2
    assert found[0].whole.high < 0.95 < found[0].answered.low


def test_a_target_of_latency_needs_a_load_and_counts_the_queue(search):
    """A board of 8 ms an image answers 60 images a second, but not within 10 ms."""
    with pytest.raises(UsageError, match="depends on the load; give --rate"):
        search("p99=80ms")
    found, answer = search("p99=25ms", rate=60.0)
    assert [(one.devices, one.verdict) for one in found][-1][1] == "met"
    assert found[0].verdict == "missed"
    assert "p99 " in answer


def test_boards_without_room_for_the_model_are_refused(search):
    with pytest.raises(UsageError, match="a site of 16 devices: 4 blocks with 1 holders each"):
        search("0.9", capacity=0.2)


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [("0.999", "whole", 0.999), ("99.9%", "whole", 0.999), ("answered=0.5", "answered", 0.5), ("p99=2s", "p99", 2e3)],
)
def test_targets_are_read(text, kind, value):
    found = Target.parse(text)
    assert (found.kind, found.value) == (kind, pytest.approx(value))


@pytest.mark.parametrize("text", ["", "1", "0", "100%", "p99=5", "whole=5ms", "median=5ms", "-1", "nan", "99,9%"])
def test_other_targets_are_refused(text):
    with pytest.raises(UsageError, match=r"cannot be read; write 0\.999 or 99\.9% for whole answers"):
        Target.parse(text)
