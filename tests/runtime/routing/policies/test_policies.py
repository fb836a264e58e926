"""Which block runs next and who runs it, case by case."""

import itertools
import random
import re
from pathlib import Path

import pytest

from ls_edge.runtime.protocol.messages import Itinerary, ReturnReason
from ls_edge.runtime.routing.policies import POLICIES, policy_of
from ls_edge.runtime.routing.policies.policy import RunHere, SendTo, Wait
from ls_edge.runtime.routing.state.candidates import LocalNode
from tests.runtime.routing.driver import Candidate

HERE = RunHere
UNREACHABLE, CREDIT = ReturnReason.UNREACHABLE, ReturnReason.CREDIT


def choose(itinerary, *situation, **more):
    return policy_of(itinerary.policy).next_step(itinerary, *situation, **more)


def way(policy="nearest", remaining=(0, 1, 2, 3), **more):
    return Itinerary("laptop", policy, tuple(remaining), 0, **more)


def peer(name, blocks, *, credit=1, wait=0, reach=(), block=100, link=0):
    return Candidate(name, frozenset(blocks), frozenset(reach), credit, wait, block, link)


def own(*blocks, wait=0, block=100):
    return LocalNode(frozenset(blocks), wait, block)


CASES = {
    "own block first": (way(), own(0), [peer("a", [0])], True, HERE(0)),
    "own block, though another is idle and we are busy": (way(), own(0, wait=10**6), [peer("a", [0])], True, HERE(0)),
    "next block is elsewhere": (way(), own(1, 2), [peer("a", [0])], True, SendTo("a")),
    "trained order is kept where it can be": (way(), own(), [peer("a", [3]), peer("b", [0])], True, SendTo("b")),
    "the closest that can be reached": (way(), own(), [peer("a", [3]), peer("b", [1])], True, SendTo("b")),
    "our own where the next is out of reach": (way(), own(2), [], True, HERE(2)),
    "sequential never reorders": (way("sequential"), own(1, 2, 3), [peer("a", [1, 2, 3])], True, UNREACHABLE),
    "sequential runs the next": (way("sequential", (2, 3)), own(2), [], True, HERE(2)),
    "sequential sends the next": (way("sequential", (2, 3)), own(3), [peer("a", [2])], True, SendTo("a")),
    "sequential waits for credit": (way("sequential"), own(1), [peer("a", [0], credit=0)], True, Wait(("a",))),
    "sequential gives back without": (way("sequential"), own(1), [peer("a", [0], credit=0)], False, CREDIT),
    "random keeps the order that was drawn": (way("random", (3, 0, 1)), own(0), [peer("a", [3])], True, SendTo("a")),
    "random reorders where it must": (way("random", (3, 0, 1)), own(1), [peer("a", [0])], True, SendTo("a")),
    "patient: waits for the next block's holder": (way(), own(1), [peer("a", [0], credit=0)], True, Wait(("a",))),
    "impatient: goes on with another": (way(), own(1), [peer("a", [0], credit=0)], False, HERE(1)),
    "impatient: sends on another": (
        way(), own(), [peer("a", [0], credit=0), peer("b", [2])], False, SendTo("b"),
    ),
    "impatient, none has credit": (
        way(), own(), [peer("a", [0], credit=0), peer("b", [2], credit=0)], False, CREDIT,
    ),
    "another holder has credit": (
        way(), own(), [peer("a", [0], credit=0), peer("b", [0])], True, SendTo("b"),
    ),
    "saturated is no reason for a relay": (
        way(), own(), [peer("a", [0], credit=0), peer("b", [], reach=[0])], False, CREDIT,
    ),
    "least wait": (way(), own(), [peer("a", [0], wait=300), peer("b", [0], wait=200)], True, SendTo("b")),
    "longest run of next blocks": (
        way(), own(), [peer("a", [0]), peer("b", [0, 1, 2]), peer("c", [0, 1])], True, SendTo("b"),
    ),
    "a run is counted from the first that it has": (
        way(remaining=(5, 0, 1, 2)), own(), [peer("a", [0, 2]), peer("b", [0, 1])], True, SendTo("b"),
    ),
    "least wait before longest run": (
        way(), own(), [peer("a", [0, 1, 2, 3], wait=1), peer("b", [0])], True, SendTo("b"),
    ),
    "relay where nothing is in reach": (way(), own(), [peer("a", [9], reach=[2])], True, SendTo("a", relay=True)),
    "relay towards the next block first": (
        way(), own(), [peer("a", [], reach=[2]), peer("b", [], reach=[0], wait=9)], True, SendTo("b", relay=True),
    ),
    "relay only where nothing else runs": (way(), own(), [peer("a", [3], reach=[0])], True, SendTo("a")),
    "a relay needs a credit": (way(), own(), [peer("a", [], reach=[0], credit=0)], True, Wait(("a",))),
    "but not for ever": (way(), own(), [peer("a", [], reach=[0], credit=0)], False, CREDIT),
    "nobody relays twice in a row": (way(relays=("a",)), own(), [peer("a", [], reach=[0])], True, UNREACHABLE),
    "but may run a block": (way(relays=("a",)), own(), [peer("a", [0])], True, SendTo("a")),
    "sequential relays towards the next block alone": (
        way("sequential"), own(), [peer("a", [], reach=[1])], True, UNREACHABLE,
    ),
    "nobody there": (way(), own(), [], True, UNREACHABLE),
    "nobody has it": (way(), own(), [peer("a", [7])], True, UNREACHABLE),
    "fastest: the least wait, whatever block": (
        way("fastest"), own(), [peer("a", [0], wait=900), peer("b", [3])], True, SendTo("b"),
    ),
    "fastest: own engine where it is free": (
        way("fastest"), own(2), [peer("a", [0], link=50)], True, HERE(2),
    ),
    "fastest: away from a busy engine": (
        way("fastest"), own(0, wait=5000), [peer("a", [3], link=50)], True, SendTo("a"),
    ),
    "fastest: a slow link is shared over the blocks behind it": (
        way("fastest"), own(), [peer("a", [0], link=300), peer("b", [1, 2, 3], link=600)], True, SendTo("b"),
    ),
    "fastest: does not wait for one holder's credit": (
        way("fastest"), own(), [peer("a", [0], credit=0), peer("b", [3], wait=9999)], True, SendTo("b"),
    ),
    "fastest: here, closest to the trained order": (way("fastest", (3, 1, 2)), own(1, 2), [], True, HERE(1)),
    "fastest: waits where nobody has a credit": (way("fastest"), own(), [peer("a", [0], credit=0)], True, Wait()),
    "fastest: relays as the others": (way("fastest"), own(), [peer("a", [], reach=[0])], True, SendTo("a", relay=True)),
}  # fmt: skip


@pytest.mark.parametrize(("itinerary", "mine", "others", "patient", "expected"), CASES.values(), ids=CASES)
def test_choice(itinerary, mine, others, patient, expected):
    assert choose(itinerary, mine, others, patient=patient) == expected
    assert choose(itinerary, mine, others[::-1], patient=patient) == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_holders_share_the_work(policy):
    others = [peer(name, [0, 1]) for name in "abc"]
    chosen = [choose(way(policy), own(), others, patient=True, tie_break=n).holder for n in range(30)]
    assert sorted(chosen) == sorted("abc" * 10)
    assert chosen[:3] != chosen[:1] * 3


@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_is_chosen_can_be_done(policy):
    """Thousands of drawn situations: nothing is sent where no credit, no block and no way to one is."""
    rng = random.Random(policy)
    kinds = set()
    for _ in range(3000):
        remaining = rng.sample(range(6), rng.randint(1, 6))
        others = [
            peer(name, rng.sample(range(6), rng.randint(0, 3)), credit=rng.randint(0, 2), wait=rng.randint(0, 3),
                 reach=rng.sample(range(6), rng.randint(0, 3)), link=rng.randint(0, 3))
            for name in "abcd"[: rng.randint(0, 4)]
        ]  # fmt: skip
        mine = own(*rng.sample(range(6), rng.randint(0, 2)), wait=rng.randint(0, 3))
        itinerary = way(policy, remaining, relays=tuple(rng.sample("abcd", rng.randint(0, 2))))
        patient = rng.random() < 0.5
        choice = choose(itinerary, mine, others, patient=patient, tie_break=rng.randint(0, 9))
        kinds.add(type(choice))
        wanted = set(remaining[:1] if policy == "sequential" else remaining)
        by_name = {c.name: c for c in others}
        if isinstance(choice, RunHere):
            assert choice.block in mine.blocks & wanted
        elif isinstance(choice, SendTo):
            holder = by_name[choice.holder]
            assert holder.credits > 0
            assert wanted & (holder.reach_blocks if choice.relay else holder.blocks)
            assert not choice.relay or not itinerary.relays
        else:
            assert not wanted & mine.blocks or isinstance(choice, Wait)
            relays = [c for c in others if wanted & c.reach_blocks]
            holders = [c for c in others if wanted & c.blocks] or ([] if itinerary.relays else relays)
            assert isinstance(choice, ReturnReason) or (patient and holders)
            assert choice != CREDIT or (holders and not any(c.credits for c in holders))
            assert choice != UNREACHABLE or not holders
    assert kinds == {RunHere, SendTo, Wait, ReturnReason}


def test_the_order_of_candidates_never_matters():
    others = [peer("a", [0, 1]), peer("b", [0, 2], wait=1), peer("c", [1, 2, 3], credit=0)]
    for policy in POLICIES:
        chosen = {choose(way(policy), own(), order, patient=True) for order in itertools.permutations(others)}
        assert len(chosen) == 1


def test_nobody_but_the_table_compares_policy_names():
    """What a policy does differently is an attribute or a method of it, so that a new one is a file and a line."""
    root = Path(__file__).parents[4]
    files = [path for folder in ("runtime", "ls_edge", "benchmarks") for path in (root / folder).rglob("*.py")]
    comparison = re.compile(r"policy (==|!=) [\"']|if .*policy (not )?in [(\[]")
    found = [str(path) for path in files if comparison.search(path.read_text(encoding="utf-8"))]
    assert not found


def test_a_policy_of_a_newer_version_counts_as_nearest():
    assert policy_of("of tomorrow") is POLICIES["nearest"]
    assert [name for name, policy in POLICIES.items() if name != policy.name] == []


def test_the_document_has_a_row_for_every_policy():
    section = (Path(__file__).parents[4] / "docs/run.md").read_text(encoding="utf-8").split("\n## Choose a policy\n")[1]
    assert set(re.findall(r"^\| `(\w+)`", section.split("\n## ")[0], re.M)) == set(POLICIES)
