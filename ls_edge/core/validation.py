"""Strict reading of JSON and YAML documents from outside, with errors that include the place.

:func:`decode_json` reads a JSON document. :func:`load_yaml` reads a YAML file that a user wrote, rejects duplicate
keys, and reports an error in one line with file, line, and column; its caller checks relations between values and
reports them with :meth:`SourceMap.error`. Unquoted values are words such as ``true`` and ``off``, and decimal
numbers; tags are rejected. The sizes of both are limited before there is a tree.

:func:`explain` rewrites the errors of :mod:`msgspec`: ``Expected `int` >= 1 - at `$.peers[0].threads` `` becomes
"threads is 0; it has to be a whole number from 1 to 1024".
The type determines the allowed values; a ``description`` in its ``Meta`` describes them in words.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import yaml
from msgspec import Meta, inspect

from ls_edge.core.errors import ConfigError, UsageError
from ls_edge.core.files import MAX_BYTES, read_file
from ls_edge.core.text import counted, shorten

T = TypeVar("T")
S = TypeVar("S", bound="Settings")
Path_ = tuple[str | int, ...]

SHOWN = 60
"""Maximum characters of a value in an error."""
MAX_DEPTH = 20
MAX_VALUES = 100_000
_TOO_LARGE = f"deeper than {MAX_DEPTH} levels or more than {MAX_VALUES} values; simplify it"
MAX_NAMES = 20
"""Maximum number of known names in an error."""
_ANY = "*"
"""Step of a path for some value of a mapping; msgspec does not say which."""
_GROUPS = (inspect.StructType, inspect.TypedDictType)


class InvalidValue(NamedTuple):
    """A value that is not allowed."""

    where: Path_
    """Path of keys and positions, such as ``("peers", 0, "blocks")``."""
    text: str
    is_key: bool = False


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that are both flags of a command and arguments of a function; :func:`flag` describes each."""

    @classmethod
    def of(cls: type[S], given: Mapping[str, Any], *, strict: bool = True) -> S:
        """Create settings from arguments; raise :class:`UsageError` for an unknown name or an invalid value.

        Unless ``strict``, numbers may be strings.
        """
        plain = {name: _as_plain(value) for name, value in given.items()}
        try:
            return msgspec.convert(plain, cls, strict=strict)
        except msgspec.ValidationError as error:
            raise UsageError(explain(str(error), plain, cls).text) from None


def _as_plain(value: Any) -> Any:
    """Convert NumPy numbers and arrays to Python's, and sequences to lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def flag(help_text: str, metavar: str = "N") -> Meta:
    """Return the description of a setting for the help text of the command."""
    return Meta(extra={"help": help_text, "metavar": metavar})


class InvalidDocument(ValueError):
    """A JSON document that cannot be used; the text begins with ``:line:column`` if the place is known."""


class OtherSchema(InvalidDocument):
    """A JSON document of another schema."""


def explain(message: str, value: Any, type_: Any, source: Mapping[Path_, str] | None = None) -> InvalidValue:
    """Explain msgspec's ``message`` about ``value`` (plain lists and dictionaries), which does not match ``type_``.

    ``source`` contains the original text of values, which a YAML parser may have converted.
    """
    text, _, at = message.partition(" - at `")
    where = _with_keys(_path(at), message, value, type_)
    expected = type_at(type_, where)
    if unknown := re.search(r"unknown field `(.+)`", text):
        return InvalidValue((*where, unknown[1]), unknown_name("key", unknown[1], _keys(expected)), is_key=True)
    if missing := re.search(r"missing required field `(.+)`", text):
        return InvalidValue(where, f"the key {missing[1]!r} is missing here; add it")
    by_type = text.startswith(("Expected ", "Invalid enum value", "Number out of range"))
    found = at_path(value, where)
    if not by_type and isinstance(found, dict):  # a struct's own check
        return InvalidValue(where, text)
    name = next(
        (step for step in reversed(where) if step != _ANY and isinstance(step, str)), "" if where else "the file"
    )
    if where and isinstance(where[-1], int):
        name += f"[{where[-1]}]"
    written = (source or {}).get(where)
    is_changed = written is not None and not isinstance(found, (str, type(None)))
    if by_type:
        text = f"{'each of its values' if _ANY in where else 'it'} has to be {describe_type(expected)}"
        if is_changed and any(isinstance(member, inspect.StrType) for member in _members(expected)):
            text += f"; put it in quotes: {json.dumps(written)}"
    shown = written if is_changed else show_value(found)
    if name == "public_key" and isinstance(found, str):  # it may be the secret one
        shown = counted(len(found), "character")
    return InvalidValue(where, f"{shorten(name, SHOWN)} is {shown}; {text}")


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """Return ``unknown key 'rote'; did you mean 'rate'?``, or list the known names if none of them is similar."""
    listed = list(known)
    near = difflib.get_close_matches(name[:SHOWN], listed, n=1)
    names = ", ".join([*listed[:MAX_NAMES], *(["…"] if len(listed) > MAX_NAMES else [])])
    hint = f"did you mean {near[0]!r}?" if near else f"known here: {names}" if listed else "remove it"
    return f"unknown {what} {show_value(name)}; {hint}"


def type_at(type_: Any, where: Path_) -> inspect.Type:
    """Return the type at the path ``where`` in ``type_``."""
    info = inspect.type_info(type_)
    for step in where:
        inner = (_inside(member, step) for member in _members(info))
        info = next((found for found in inner if found is not None), inspect.AnyType())
    return info


def _inside(info: inspect.Type, step: str | int) -> inspect.Type | None:
    if isinstance(info, _GROUPS):
        return next((field.type for field in info.fields if field.encode_name == step), None)
    if isinstance(info, (inspect.ListType, inspect.VarTupleType)):
        return info.item_type if isinstance(step, int) else None
    if isinstance(info, inspect.TupleType):
        return info.item_types[step] if isinstance(step, int) and step < len(info.item_types) else None
    return info.value_type if isinstance(info, inspect.DictType) else None


def at_path(value: Any, where: Path_) -> Any:
    """Return the value at the path ``where`` in ``value``, or its nearest parent that exists."""
    for step in where:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return value
    return value


def describe_type(info: inspect.Type) -> str:
    """Describe the values that a type allows: ``a whole number``, ``a list of text``, ``one of raw, fp16, int8``."""
    if isinstance(info, inspect.Metadata):
        return str((info.extra_json_schema or {}).get("description") or describe_type(info.type))
    if isinstance(info, inspect.UnionType):
        found = dict.fromkeys(describe_type(member) for member in info.types if member != inspect.NoneType())
        if "a number" in found:
            found.pop("a whole number", None)
        return " or ".join(found) or "left out"
    if isinstance(info, inspect.LiteralType):
        return f"{'one of ' if len(info.values) > 1 else ''}{', '.join(map(str, info.values))}"
    if isinstance(info, (inspect.ListType, inspect.VarTupleType)):
        inner = re.sub(r"^a (group|list|number|whole number)\b", r"\1s", describe_type(info.item_type))
        return "a list" if isinstance(info.item_type, inspect.AnyType) else f"a list of {inner}"
    if isinstance(info, inspect.TupleType):
        return f"a list of {len(info.item_types)}: {', '.join(describe_type(item) for item in info.item_types)}"
    if isinstance(info, _GROUPS):
        keys = _keys(info)
        return f"a group of keys ({', '.join(keys[:6])}{', …' if len(keys) > 6 else ''})"
    if isinstance(info, (inspect.IntType, inspect.FloatType)):
        bounds = {"from": info.ge, "above": info.gt, "to": info.le, "below": info.lt}
        number = "a whole number" if isinstance(info, inspect.IntType) else "a number"
        return number + "".join(f" {words} {bound:.12g}" for words, bound in bounds.items() if bound is not None)
    simple = {inspect.StrType: "text", inspect.BoolType: "true or false", inspect.DictType: "a group of keys"}
    return simple.get(type(info), "something else")


def _members(info: inspect.Type) -> tuple[inspect.Type, ...]:
    if isinstance(info, inspect.Metadata):
        return _members(info.type)
    return sum(map(_members, info.types), ()) if isinstance(info, inspect.UnionType) else (info,)


def _keys(info: inspect.Type) -> list[str]:
    struct = next((member for member in _members(info) if isinstance(member, _GROUPS)), None)
    return [field.encode_name for field in struct.fields] if struct is not None else []


def _path(at: str) -> Path_:
    steps = re.findall(r"\.([^.\[\]`]+)|\[(\d+|\.\.\.)\]", at)
    return tuple(name or (int(index) if index.isdigit() else _ANY) for name, index in steps)


def _with_keys(where: Path_, message: str, value: Any, type_: Any) -> Path_:
    """Return a path with the key of each small mapping: the one whose value alone causes the same message."""
    value = copy.deepcopy(value) if _ANY in where else value
    while _ANY in where and len(group := at_path(value, where[: where.index(_ANY)])) <= 100:  # each is tried
        at = where.index(_ANY)
        for key, one in tuple(group.items()):
            group.clear()
            group[key] = one
            try:
                msgspec.convert(value, type_)
            except msgspec.ValidationError as error:
                if str(error) == message:
                    break
        where = (*where[:at], key, *where[at + 1 :])
    return where


def show_value(value: Any) -> str:
    """Return a value as a user would have written it, abbreviated if it is long."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "empty"
    if isinstance(value, dict):
        return "a group of keys"
    text = repr(value[: SHOWN + 1] if isinstance(value, str) else value)
    if len(text) <= SHOWN:
        return text
    return f"a list of {len(value)}" if isinstance(value, list) else text[: SHOWN - 1] + "…"


class _Versioned(msgspec.Struct, frozen=True):
    schema: int | str | None = None


def decode_json(raw: bytes, type_: type[T], schema: int | None = None) -> T:
    """Decode a JSON document, with a ``schema`` number unless it is None; raise :class:`InvalidDocument`."""
    if len(raw) > MAX_BYTES:
        raise InvalidDocument(f" has more than {MAX_BYTES} bytes")
    try:
        found = schema if schema is None else msgspec.json.decode(raw, type=_Versioned).schema
        if found == schema:
            return msgspec.json.decode(raw, type=type_)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: UTF-8, or digits of an integer
        raise _json_fault(raw, type_, error) from None
    age = "a newer" if isinstance(found, int) and isinstance(schema, int) and found > schema else "an older"
    raise OtherSchema(f" has schema {show_value(found)}, not {schema}: made by {age} ls-edge")


def read_json(path: Path, type_: type[T], schema: int | None = None) -> T:
    """Read a JSON document; raise :class:`InvalidDocument` as :func:`decode_json` does, also if it cannot be read."""
    try:
        return decode_json(read_file(path), type_, schema)
    except OSError as error:
        raise InvalidDocument(f": {error.strerror}") from None


def _json_fault(raw: bytes, type_: type[Any], error: Exception) -> InvalidDocument:
    try:
        value = json.loads(raw)
    except json.JSONDecodeError as wrong:
        problem = f"{wrong.msg[:1].lower()}{wrong.msg[1:]}"
        return InvalidDocument(f":{wrong.lineno}:{wrong.colno}: not JSON, {problem}")
    except (ValueError, RecursionError):
        return InvalidDocument(": not JSON, or nested too deeply, or with numbers of thousands of digits")
    invalid = explain(str(error), value, type_)
    steps = "".join(f"[{step}]" if isinstance(step, int) else f".{shorten(step, SHOWN)}" for step in invalid.where)
    inside = f" (at {steps.lstrip('.')})" if len(invalid.where) > 1 else ""
    return InvalidDocument(f": {invalid.text}{inside}")


@dataclass(eq=False)
class SourceMap:
    """Lines and columns of keys and values in a file, by path, such as ``("peers", 0, "blocks")``."""

    path: Path
    marks: dict[Path_, tuple[int, int]] = field(default_factory=dict)
    key_marks: dict[Path_, tuple[int, int]] = field(default_factory=dict)
    written: dict[Path_, str] = field(default_factory=dict)
    """Text of unquoted values."""

    def error(self, message: str, *where: str | int, key: bool = False) -> ConfigError:
        """Return a :class:`ConfigError` at the value (or ``key``) of a path, or at its nearest parent."""
        marks = self.key_marks if key else self.marks
        for end in range(len(where), -1, -1):
            mark = marks.get(where[:end]) or self.marks.get(where[:end])
            if mark is not None:
                return ConfigError(message, path=self.path, line=mark[0], column=mark[1])
        return ConfigError(message, path=self.path)


def read_yaml(path: Path) -> bytes:
    """Return the content of a YAML file; raise :class:`ConfigError` if it cannot be read."""
    try:
        return read_file(path, MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}; check the path", path=path) from None


def parse_yaml(raw: bytes, path: Path) -> tuple[str, yaml.Node | None]:
    """Return the text of a YAML file and its top node (None if it is empty); raise :class:`ConfigError`."""
    try:
        text = raw.decode("utf-8").removeprefix("\ufeff")  # editors on Windows write it first
        if re.search("^%TAG", text, re.MULTILINE):  # the parser compares each with all others
            raise ConfigError("%TAG is not supported; remove it", path=path)
        return text, yaml.compose(text, Loader=_Loader)
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise ConfigError(f"not UTF-8 text (byte {error.start}); save it as UTF-8", path=path) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        problem = shorten(error.problem or error.context or "", 2 * SHOWN)
        if mark is not None and text[mark.index : mark.index + 1] == "\t":
            problem = "a line is indented with a tab; use spaces"
        place = {} if mark is None else {"line": mark.line + 1, "column": mark.column + 1}
        raise ConfigError(f"not YAML: {problem}", path=path, **place) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"not YAML: {shorten(str(error).splitlines()[0], 2 * SHOWN)}", path=path) from None
    except OverflowError:  # by the loader
        raise ConfigError(_TOO_LARGE, path=path) from None


def load_yaml(path: str | Path, type_: type[T], raw: bytes | None = None) -> tuple[T, SourceMap]:
    """Read the file ``path``, or its content ``raw``, as ``type_``; raise :class:`ConfigError` if that fails.

    Types that msgspec does not support need a class method ``parse`` that raises ValueError.
    """
    path = Path(path)
    source_map = SourceMap(path)
    _, node = parse_yaml(read_yaml(path) if raw is None else raw, path)
    plain = None if node is None else _plain(node, (), source_map)
    empty = plain is None
    plain = {} if empty else plain
    try:
        return msgspec.convert(plain, type_, dec_hook=lambda kind, value: kind.parse(value)), source_map
    except msgspec.ValidationError as error:
        if empty:
            raise ConfigError(f"the file is empty: {explain(str(error), {}, type_).text}", path=path) from None
        found = explain(str(error), plain, type_, source_map.written)
        raise source_map.error(found.text, *found.where, key=found.is_key) from None


def parse_yaml_value(text: str, what: str) -> Any:
    """Parse a value as in a YAML file; raise :class:`UsageError` that begins with ``what`` if it is invalid."""
    path = Path(what)
    try:
        node = parse_yaml(text.encode("utf-8", "replace"), path)[1]
        return None if node is None else _plain(node, (), SourceMap(path))
    except ConfigError as error:
        raise UsageError(str(error)) from None


class _Loader(getattr(yaml, "CBaseLoader", yaml.BaseLoader)):  # type: ignore[misc]
    """Loader that counts what it builds; tags are empty unless the document has them."""

    _depth = _count = 0

    def descend_resolver(self, _parent: yaml.Node | None, _index: object) -> None:
        self._depth, self._count = self._depth + 1, self._count + 1
        if self._depth > MAX_DEPTH + 2 or self._count > 2 * MAX_VALUES:  # of keys and values
            raise OverflowError

    def ascend_resolver(self) -> None:
        self._depth -= 1

    def resolve(self, _kind: type[yaml.Node], value: str | None, _implicit: object) -> str:
        """Return the tag of a node without one; raise :class:`UnicodeError` for half of a character (a surrogate)."""
        if value is not None:
            value.encode()
        return ""


def _plain(node: yaml.Node, where: Path_, source_map: SourceMap) -> Any:
    if len(where) > MAX_DEPTH or len(source_map.marks) > MAX_VALUES:  # with aliases, small files can be endless
        raise source_map.error(_TOO_LARGE)
    source_map.marks[where] = (node.start_mark.line + 1, node.start_mark.column + 1)
    if node.tag:
        raise source_map.error(f"the tag {show_value(node.tag)} is not supported; remove it", *where)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*where, index), source_map) for index, item in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, where, source_map)
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        is_plain = isinstance(key_node, yaml.ScalarNode) and not key_node.style
        key = plain_value(key_node.value) if is_plain else key_node.value
        here = (*where, key if isinstance(key, str) else "")
        source_map.key_marks[here] = (key_node.start_mark.line + 1, key_node.start_mark.column + 1)
        if not isinstance(key, str) or key_node.tag:
            shown = show_value(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "a list or group of keys"
            raise source_map.error(f"the key {shown} is not text; put it in quotes, or correct it", *here, key=True)
        if key in result:
            raise source_map.error(f"the key {show_value(key)} occurs twice; keep one", *here, key=True)
        result[key] = _plain(value_node, here, source_map)
    return result


_WORDS = {"": None, "~": None} | {
    word: value
    for words, value in (("null", None), ("true yes on", True), ("false no off", False))
    for each in words.split()
    for word in (each, each.capitalize(), each.upper())
}
_NUMBER = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")


def plain_value(text: str) -> bool | float | str | None:
    """Return the value of unquoted text in a YAML file."""
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > SHOWN or not _NUMBER.fullmatch(text):
        return text
    return int(text) if text.lstrip("+-").isdecimal() else float(text)


def yaml_text(text: str) -> str:
    """Return text as it is written in a YAML file: in quotes if it would be read as something else."""
    return text if isinstance(plain_value(text), str) else f'"{text}"'


def dump_yaml(value: Any, **how: Any) -> str:
    """Return plain values as YAML that :func:`load_yaml` reads; ``how`` are options of ``yaml.dump``."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, **how))


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes strings such as ``1e3``, which :func:`load_yaml` reads as numbers.

    Unicode line breaks, which parsers convert to spaces, are escaped.
    """


def _represent(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    quoted = yaml_text(text) != text or re.search("[\x85\u2028\u2029]", text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if quoted else None)


_Dumper.add_representer(str, _represent)


def _scalar(node: yaml.ScalarNode, where: Path_, source_map: SourceMap) -> Any:
    if node.style:
        return node.value
    source_map.written[where] = node.value
    value = plain_value(node.value)
    if isinstance(value, (int, float)) and not -(2**63) <= value < 2**63:  # infinity, too
        name = next((step for step in reversed(where) if isinstance(step, str)), "the value")
        raise source_map.error(
            f"{shorten(name, SHOWN)} is {shorten(node.value, SHOWN)}; it has to be a finite number within 64 bits",
            *where,
        )
    return value
