"""YAML files: every complaint has file, line and column."""

import itertools

import msgspec
import pytest

from ls_edge import yamlfile
from ls_edge.errors import ConfigError


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    depth: int
    names: list[str] = []


class Settings(msgspec.Struct, forbid_unknown_fields=True):
    rate: float
    inner: Inner | None = None
    more: list[Inner] = []


def load(tmp_path, text):
    path = tmp_path / "settings.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return yamlfile.load(path, Settings)


def failure(tmp_path, text):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    error = caught.value
    assert str(error).startswith(f"{tmp_path / 'settings.yaml'}")
    assert "\n" not in str(error)
    return error


def test_reads_values(tmp_path):
    settings, places = load(tmp_path, "rate: 0.5\ninner: {depth: 3}\nmore:\n  - depth: 1\n    names: [a, b]\n")
    assert settings == Settings(0.5, Inner(3), [Inner(1, ["a", "b"])])
    assert places.marks["more", 0, "names", 1] == (5, 16)
    assert places.key_marks["more", 0, "names"] == (5, 5)


@pytest.mark.parametrize(
    ("text", "line", "column", "what"),
    [
        ("rate: 1\nrote: 2\n", 2, 1, "unknown key 'rote'; did you mean 'rate'?"),
        ("rate: 1\nzzz: 2\n", 2, 1, "unknown key 'zzz'; known here: rate, inner, more"),
        ("rate: 1\nmore:\n  - depth: 1\n  - dept: 1\n", 4, 5, "unknown key 'dept'; did you mean 'depth'?"),
        ("rate: 1\ninner:\n  names: [a]\n", 3, 3, "the key 'depth' is missing here; add it"),
        ("inner: {depth: 1}\n", 1, 1, "the key 'rate' is missing here; add it"),
        ("rate: fast\n", 1, 7, "expected `float`, got `str` for 'rate'"),
        ("rate: 1\nmore:\n  - {depth: 1}\n  - {depth: x}\n", 4, 13, "expected `int`, got `str` for 'depth'"),
        ("rate: 1\nrate: 2\n", 2, 1, "'rate' stands twice; keep one"),
        ("rate: 1\ninner: {depth: 1, depth: 2}\n", 2, 19, "'depth' stands twice; keep one"),
        ("rate: [1\nmore: 2", 2, 5, "not YAML:"),
        ("rate: 1\n\tmore: 2\n", 2, 1, "not YAML:"),
        ("rate: 1\nmore: *none\n", 2, 7, "not YAML:"),
        ("- 1\n- 2\n", 1, 1, "expected `object`, got `array`"),
        ("42", 1, 1, "expected `object`, got `int`"),
        ("rate: !!python/object/apply:os.getcwd []\n", 1, 7, ""),
    ],
)
def test_complaints_have_a_place(tmp_path, text, line, column, what):
    error = failure(tmp_path, text)
    assert what in str(error)
    assert (error.line, error.column) == (line, column)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"settings\.yaml: no such file; check the path"):
        yamlfile.load(tmp_path / "settings.yaml", Settings)
    with pytest.raises(ConfigError, match="cannot be read"):
        yamlfile.load(tmp_path, Settings)
    assert "not UTF-8 text (byte 6)" in str(failure(tmp_path, b"rate: \xff"))
    assert "'rate' is missing" in str(failure(tmp_path, ""))


BOMB = "a: &a [0]\n" + "".join(f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in itertools.pairwise("abcdefgh"))


ENDLESS = ["a: &a [*a]", "a: &a [*a, *a]", "[" * 2000, "a: " + "[" * 30 + "]" * 30, BOMB]
ODD = ["&x : 1", "? [1, 2]\n: 3", "{1: 2}", "null: 1", "rate: 2026-13-45", "\x00", "---\n---\n", "<<: 1"]


@pytest.mark.parametrize("text", ENDLESS + ODD)
def test_odd_files_are_one_error(tmp_path, text):
    failure(tmp_path, text)


def test_errors_of_the_caller_fall_back_to_the_parent(tmp_path):
    _, places = load(tmp_path, "rate: 1\nmore:\n  - depth: 1\n")
    assert str(places.error("why", "more", 0, "names")).endswith("settings.yaml:3:5: why")
    assert str(places.error("why", "more", 0, "depth")).endswith(":3:12: why")
    assert str(places.error("why", "more", 0, "depth", key=True)).endswith(":3:5: why")
