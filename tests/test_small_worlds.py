"""Every course of small worlds: the search finds a planted fault, and none in the routing."""

import random

import pytest

from ls_edge.runtime.routing.state.events import Complete
from tests.small_worlds import WORLDS, World, explore

FULL = "two peers with everything"


class Forgetful(World):
    """A world that loses the answer if a message could not be sent: a fault planted for the search."""

    def _execute(self, name, one):
        if isinstance(one, Complete) and self.faults == 0 and not self.cut and len(self.alive) == 3 and not self.hung:
            return
        super()._execute(name, one)


def test_a_planted_fault_is_found_with_the_course_that_leads_there():
    with pytest.raises(AssertionError, match=r"no outcome after .*'(refuse|drain)'"):
        explore(Forgetful(*WORLDS[FULL]), 3000)


def test_states_with_the_same_content_are_one():
    one, other = World(*WORLDS[FULL]), World(*WORLDS[FULL])
    assert one.content() == other.content()
    step = next(iter(one.choices()))
    one.take(step)
    assert one.content() != other.content()
    other.take(step)
    assert one.content() == other.content()


@pytest.mark.release
def test_no_course_of_two_peers_breaks_a_guarantee():
    found = explore(World(*WORLDS[FULL]))
    assert found.states > 500
    assert found.answered == found.ends > 100, "a holder is left after any one fault"


@pytest.mark.release
@pytest.mark.parametrize("name", [name for name in WORLDS if name != FULL])
def test_no_course_of_other_worlds_breaks_a_guarantee_as_far_as_it_goes(name):
    assert explore(World(*WORLDS[name]), 1500).ends > 100


@pytest.mark.release
@pytest.mark.parametrize("name", [name for name, world in WORLDS.items() if world[-1]])
def test_no_drawn_course_with_states_in_any_order_breaks_a_guarantee(name):
    held, policy, skips, _ = WORLDS[name]
    assert explore(World(held, policy, skips, prompt=False), 500, random.Random(0)).states >= 500
