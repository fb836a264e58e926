"""The tree of errors is the one that the module draws, exit codes included."""

import inspect
import re

from ls_edge import errors


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


def test_the_drawing_is_true():
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


def test_a_config_error_begins_with_its_place():
    assert str(errors.ConfigError("why", path="a.yaml", line=3, column=7)) == "a.yaml:3:7: why"
    assert str(errors.ConfigError("why", path="a.yaml", line=3)) == "a.yaml:3:1: why"
    assert str(errors.ConfigError("why", path="a.yaml")) == "a.yaml: why"
