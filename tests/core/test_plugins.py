"""Classes of other packages: found by entry point or by module:Class, and checked."""

import sys

import pytest

from ls_edge.core import plugins
from ls_edge.core.errors import UsageError
from ls_edge.runtime.routing.policies import POLICIES, find_policy, policy_of
from ls_edge.runtime.routing.policies.policy import Policy

MODULE = """
from ls_edge.runtime.routing.policies.policy import Policy

class Good(Policy):
    name = "good"

class Misnamed(Policy):
    name = "other"

class NoPolicy:
    name = "none"
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a module and entry points of the group of policies where Python finds them."""

    def write(module=MODULE, **entries):
        (tmp_path / "foreign_policies.py").write_text(module)
        info = tmp_path / "foreign-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n")
        lines = (f"{name} = foreign_policies:{value}" for name, value in entries.items())
        (info / "entry_points.txt").write_text("\n".join(["[ls_edge.policies]", *lines, ""]))
        plugins.registered.cache_clear()

    monkeypatch.syspath_prepend(tmp_path)
    known = dict(POLICIES)
    yield write
    POLICIES.clear()
    POLICIES.update(known)
    plugins.registered.cache_clear()
    sys.modules.pop("foreign_policies", None)


def test_a_registered_policy_is_found_by_its_name(install):
    install(good="Good")
    assert type(find_policy("good")).__module__ == "foreign_policies"
    assert policy_of("good") is find_policy("good")


@pytest.mark.parametrize(
    ("entries", "name", "words"),
    [
        ({"good": "Good"}, "goood", "unknown policy 'goood'; did you mean 'good'?"),
        ({}, "nearst", "unknown policy 'nearst'; did you mean 'nearest'?"),
        ({"bad": "Misnamed"}, "bad", "needs the attribute name = 'bad'"),
        ({"none": "NoPolicy"}, "none", "is not a subclass of ls_edge.runtime.routing.policies.policy.Policy"),
        ({"gone": "Gone"}, "gone", "foreign_policies has no 'Gone'; it has Good, Misnamed, NoPolicy"),
        ({}, "foreign_policies:Good", "unknown policy"),  # only names that the administrator installed
    ],
)
def test_a_policy_that_is_missing_or_wrong_is_refused_with_one_line(install, entries, name, words):
    install(**entries)
    with pytest.raises(UsageError, match=words) as raised:
        find_policy(name)
    assert "\n" not in str(raised.value)


def test_a_peer_whose_package_is_broken_serves_with_nearest(install):
    install("raise ZeroDivisionError", good="Good")
    assert policy_of("good") is policy_of("never installed") is POLICIES["nearest"]


def test_a_reference_needs_no_entry_point(install):
    install()
    assert plugins.load("policies", "foreign_policies:Good", Policy, (), reference=True).name == "good"
    for name in ("a:b:c", ":", "a b:c"):
        with pytest.raises(UsageError, match=f"unknown policy '{name}'"):
            plugins.load("policies", name, Policy, (), reference=True)
