"""Strict reading of YAML files: every error has file, line and column."""

import itertools
from typing import Any, Literal

import msgspec
import pytest

from ls_edge.core import validation
from ls_edge.core.errors import ConfigError


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    depth: int
    names: list[str] = []


class Settings(msgspec.Struct, forbid_unknown_fields=True):
    rate: float
    inner: Inner | None = None
    more: list[Inner] = []


class Kinds(msgspec.Struct, forbid_unknown_fields=True):
    blocks: list[int] | str = []
    codec: Literal["raw", "fp16"] = "raw"
    threads: int | None = None
    on: bool = False
    name: str = ""
    pair: tuple[int, float] = (0, 0.0)
    share: float = 0.0
    more: dict[str, Any] = {}


def load(tmp_path, text, type_=Settings):
    path = tmp_path / "settings.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return validation.load_yaml(path, type_)


def failure(tmp_path, text, type_=Settings):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, type_)
    error = caught.value
    assert str(error).startswith(f"{tmp_path / 'settings.yaml'}")
    assert "\n" not in str(error)
    return error


FAULTS = [
    ("rate: 1\nrote: 2\n", 2, 1, "unknown key 'rote'; did you mean 'rate'?"),
    ("rate: 1\nzzz: 2\n", 2, 1, "unknown key 'zzz'; known here: rate, inner, more"),
    ("rate: 1\nmore:\n  - depth: 1\n  - dept: 1\n", 4, 5, "unknown key 'dept'; did you mean 'depth'?"),
    ("rate: 1\ninner:\n  names: [a]\n", 3, 3, "the key 'depth' is missing here; add it"),
    ("inner: {depth: 1}\n", 1, 1, "the key 'rate' is missing here; add it"),
    ("rate: fast\n", 1, 7, "rate is 'fast'; it has to be a number"),
    ("rate: 1\nmore:\n  - {depth: 1}\n  - {depth: x}\n", 4, 13, "depth is 'x'; it has to be a whole number"),
    ("rate: 1\nrate: 2\n", 2, 1, "the key 'rate' occurs twice; keep one"),
    ("rate: 1\ninner: {depth: 1, depth: 2}\n", 2, 19, "the key 'depth' occurs twice; keep one"),
    ("rate: [1\nmore: 2", 2, 5, "not YAML:"),
    ("rate: 1\n\tmore: 2\n", 2, 1, "not YAML:"),
    ("rate: 1\nmore: *none\n", 2, 7, "not YAML:"),
    ("- 1\n- 2\n", 1, 1, "the file is [1, 2]; it has to be a group of keys (rate, inner, more)"),
    ("42", 1, 1, "the file is 42; it has to be a group of keys (rate, inner, more)"),
    ("rate: !!python/object/apply:os.getcwd []\n", 1, 7, ""),
]
FAULTS_OF_KINDS = [
    ("blocks: 7", 1, 9, 'blocks is 7; it has to be a list of whole numbers or text; put it in quotes: "7"'),
    ("blocks: {a: 1}", 1, 9, "blocks is a group of keys; it has to be a list of whole numbers or text"),
    ("codec: gzip", 1, 8, "codec is 'gzip'; it has to be one of fp16, raw"),
    ("threads: two", 1, 10, "threads is 'two'; it has to be a whole number"),
    ("threads: 1.5", 1, 10, "threads is 1.5; it has to be a whole number"),
    ("'on': maybe", 1, 7, "on is 'maybe'; it has to be true or false"),
    ("name: yes", 1, 7, 'name is yes; it has to be text; put it in quotes: "yes"'),
    ("name: 012", 1, 7, 'name is 012; it has to be text; put it in quotes: "012"'),
    ("threads: 1:30", 1, 10, "threads is '1:30'; it has to be a whole number"),
    (f"threads: {'9' * 5000}", 1, 10, f"threads is '{'9' * 58}…; it has to be a whole number"),
    ("threads: !!int 5", 1, 10, "the tag 'tag:yaml.org,2002:int' is not supported; remove it"),
    ("name: !!bool maybe", 1, 7, "the tag 'tag:yaml.org,2002:bool' is not supported; remove it"),
    ("name: !!timestamp x", 1, 7, "the tag 'tag:yaml.org,2002:timestamp' is not supported; remove it"),
    (r'name: "\ud800"', 1, 10, "not YAML: "),
    (f"{'k' * 1000}: 1", 1, 1, f"unknown key '{'k' * 58}…; known here"),
    ("name:", 1, 6, "name is empty; it has to be text"),
    ("pair: [1]", 1, 7, "pair is [1]; it has to be a list of 2: a whole number, a number"),
    ("share: .nan", 1, 8, "share is '.nan'; it has to be a number"),
    ("share: 1e999", 1, 8, "share is 1e999; it has to be a finite number"),
    ("more: {deep: [1, 1e999]}", 1, 18, "deep is 1e999; it has to be a finite number"),
    (f"threads: {2**70}", 1, 10, f"threads is {2**70}; it has to be a finite number within 64 bits"),
    ("on: true", 1, 1, "the key 'on' is not text; put it in quotes, or correct it"),
    (f"? {'k' * 2000}\n: 1e999", 2, 3, "kk is 1e999; it has to be a finite number"),
    ("? [1]\n: 2", 1, 3, "the key a list or group of keys is not text"),
]


@pytest.mark.parametrize(
    ("type_", "text", "line", "column", "what"),
    [(Settings, *fault) for fault in FAULTS] + [(Kinds, *fault) for fault in FAULTS_OF_KINDS],
)
def test_errors_have_a_place_and_plain_words(tmp_path, type_, text, line, column, what):
    error = failure(tmp_path, text, type_)
    assert what in str(error)
    assert (error.line, error.column) == (line, column)
    assert "`" not in str(error)


def test_values_are_read_with_their_places(tmp_path):
    settings, places = load(tmp_path, "rate: 0.5\ninner: {depth: 3}\nmore:\n  - depth: 1\n    names: [a, b]\n")
    assert settings == Settings(0.5, Inner(3), [Inner(1, ["a", "b"])])
    assert places.marks["more", 0, "names", 1] == (5, 16)
    assert places.key_marks["more", 0, "names"] == (5, 5)


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"settings\.yaml: cannot be read: No such file or directory; check the path"):
        validation.load_yaml(tmp_path / "settings.yaml", Settings)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory; check the path"):
        validation.load_yaml(tmp_path, Settings)
    assert "not UTF-8 text (byte 6)" in str(failure(tmp_path, b"rate: \xff"))
    assert "'rate' is missing" in str(failure(tmp_path, ""))


BOMB = "a: &a [0]\n" + "".join(f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in itertools.pairwise("abcdefgh"))


ENDLESS = ["a: &a [*a]", "a: &a [*a, *a]", "[" * 2000, "a: " + "[" * 30 + "]" * 30, BOMB]
WIDE = [f"rate: [{'1,' * 200_000}]", f"{{{'a,' * 200_000}}}", f"rate: &a 1\nmore: [{'*a,' * 200_000}]"]
ODD = [
    "&x : 1",
    "? [1, 2]\n: 3",
    "{1: 2}",
    "null: 1",
    "rate: 2026-13-45",
    "\x00",
    "---\n---\n",
    "<<: 1",
    "%TAG ! x\n---\nrate: 1",
]


@pytest.mark.parametrize("text", ENDLESS + WIDE + ODD)
def test_odd_files_give_a_single_error(tmp_path, text):
    failure(tmp_path, text)


def test_errors_of_the_caller_fall_back_to_the_place_of_the_parent(tmp_path):
    _, places = load(tmp_path, "rate: 1\nmore:\n  - depth: 1\n")
    assert str(places.error("why", "more", 0, "names")).endswith("settings.yaml:3:5: why")
    assert str(places.error("why", "more", 0, "depth")).endswith(":3:12: why")
    assert str(places.error("why", "more", 0, "depth", key=True)).endswith(":3:5: why")


@pytest.mark.parametrize("text", ["rate: 1e-3", "rate: 1E-3", "rate: 1.e-3", "rate: .1e-2"])
def test_numbers_with_an_exponent_are_numbers(tmp_path, text):
    """YAML 1.1 takes most of them for text."""
    assert load(tmp_path, text)[0].rate == 0.001
    assert "it has to be a number" in str(failure(tmp_path, text.replace(": ", ": '") + "'"))


@pytest.mark.parametrize("raw", [b"\xef\xbb\xbfrate: 1\n", b"rate: 1\r\nmore: []\r\n", b"\xef\xbb\xbfrate: 1\r\n"])
def test_files_with_a_byte_order_mark_or_crlf_are_read(tmp_path, raw):
    assert load(tmp_path, raw)[0] == Settings(1.0)


def test_an_empty_file_is_called_empty(tmp_path):
    for text in ("", "\n\n", "# only a remark\n", "---\n"):
        assert "the file is empty: the key 'rate' is missing here" in str(failure(tmp_path, text))


def test_an_endless_file_is_refused(tmp_path):
    (tmp_path / "settings.yaml").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="cannot be read: larger than 4000000 bytes"):
        validation.load_yaml(tmp_path / "settings.yaml", Settings)
