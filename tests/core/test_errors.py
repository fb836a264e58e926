"""The tree of errors is the one that the module draws, exit codes included."""

import inspect
import pickle  # noqa: TID251
import re

import pytest

from ls_edge.core import errors


def drawn():
    """Parent and exit code of each error, read from the drawing."""
    found, path = {}, []
    for line in errors.__doc__.splitlines():
        match = re.match(r"^    ([│├└─ ]*)(\w+)\s*(?:exit (\d))?", line)
        if match is None or not hasattr(errors, match[2]):
            continue
        depth = len(match[1]) // 4
        path[depth:] = [match[2]]
        found[match[2]] = (path[-2] if depth else None, int(match[3]) if match[3] else None)
    return found


def test_the_tree_in_the_docstring_matches_the_classes():
    classes = {
        name: value
        for name, value in inspect.getmembers(errors, inspect.isclass)
        if value.__module__ == errors.__name__
    }
    tree = drawn()
    assert set(tree) == set(classes)
    for name, (parent, code) in tree.items():
        base = classes[name].__base__
        assert base is (classes[parent] if parent else Exception), name
        if code is not None:
            assert classes[name].exit_code == code, name
        elif parent:
            assert classes[name].exit_code == classes[parent].exit_code, name


def test_every_error_is_documented():
    assert all(getattr(errors, name).__doc__ for name in drawn())


def made(kind):
    return kind("why", path="a.yaml", line=3) if kind is errors.ConfigError else kind("why")


@pytest.mark.parametrize("kind", [getattr(errors, name) for name in drawn()])
def test_every_error_survives_pickling(kind):
    error = made(kind)
    error.record = {"request": 7}
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))


def test_a_config_error_begins_with_its_place():
    assert str(errors.ConfigError("why", path="a.yaml", line=3, column=7)) == "a.yaml:3:7: why"
    assert str(errors.ConfigError("why", path="a.yaml", line=3)) == "a.yaml:3:1: why"
    assert str(errors.ConfigError("why", path="a.yaml")) == "a.yaml: why"


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain, größer, 模型 🙂 \N{NO-BREAK SPACE}τ ± …", "plain, größer, 模型 🙂 \N{NO-BREAK SPACE}τ ± …"),
        ("\x1b]0;title\x07\x1b[2J", r"\x1b]0;title\x07\x1b[2J"),
        ("\x9b31m\x7f\x00", r"\x9b31m\x7f\x00"),
        ("two\nlines\tand\rmore\x85of\u2028them", "two lines and more of them"),
        ("evil\u202etxt.exe\u2066", r"evil\u202etxt.exe\u2066"),
        ("caf\udce9.png", r"caf\xe9.png"),
        ("\ud800\ufffe\ufeff", r"\ud800\ufffe\ufeff"),
        (7, "7"),
    ],
)
def test_printable_escapes_what_could_control_a_terminal(raw, shown):
    assert errors.printable(raw) == shown
    assert errors.printable(shown) == shown
    shown.encode("utf-8")


def test_an_error_is_one_printable_line():
    error = errors.ModelMismatch("the peer serves \x1b[2J\nfoo")
    assert str(error) == f"{error}" == r"the peer serves \x1b[2J foo"
