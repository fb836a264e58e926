"""Explanations of values that :mod:`msgspec` refused, and JSON documents with a schema number.

``Expected `int` >= 1 - at `$.peers[0].threads` `` becomes "threads is 0; it has to be a whole number from 1 to 1024".
The type says which values are allowed; a ``description`` in its ``Meta`` says it in words.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import inspect

T = TypeVar("T")
Path_ = tuple[str | int, ...]

SHOWN = 60


class InvalidValue(NamedTuple):
    """A value that is not allowed."""

    where: Path_
    """Keys and positions that lead to it, such as ``("peers", 0, "blocks")``."""
    text: str
    is_key: bool = False


class InvalidDocument(ValueError):
    """A JSON document that cannot be used; the text begins with ``:line:column`` where the place is known."""


class OtherSchema(InvalidDocument):
    """A JSON document of another schema."""


def explain(message: str, value: Any, type_: Any, source: Mapping[Path_, str] | None = None) -> InvalidValue:
    """Explain msgspec's ``message`` about ``value`` (plain lists and dictionaries), which does not fit ``type_``.

    ``source`` has the text of values in the file, which a reader such as YAML's may have changed.
    """
    text, _, at = message.partition(" - at `")
    where = _path(at)
    expected = type_at(type_, where)
    if unknown := re.search(r"unknown field `(.+)`", text):
        return InvalidValue((*where, unknown[1]), unknown_name("key", unknown[1], _keys(expected)), is_key=True)
    if missing := re.search(r"missing required field `(.+)`", text):
        return InvalidValue(where, f"the key {missing[1]!r} is missing here; add it")
    found = at_path(value, where)
    by_type = text.startswith(("Expected ", "Invalid enum value"))
    if not by_type and isinstance(found, dict):  # a struct's own check
        return InvalidValue(where, text)
    name = next((step for step in reversed(where) if isinstance(step, str)), "" if where else "the file")
    if where and isinstance(where[-1], int):
        name += f"[{where[-1]}]"
    written = (source or {}).get(where)
    is_changed = written is not None and not isinstance(found, (str, type(None)))
    if by_type:
        text = f"it has to be {describe_type(expected)}"
        if is_changed and any(isinstance(member, inspect.StrType) for member in _members(expected)):
            text += f"; put it in quotes: {json.dumps(written)}"
    return InvalidValue(where, f"{name} is {written if is_changed else shorten(found)}; {text}")


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """Return ``unknown key 'rote'; did you mean 'rate'?``, or list the known names if none is similar."""
    listed = list(known)
    near = difflib.get_close_matches(name, listed, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(listed)}" if listed else "remove it"
    return f"unknown {what} {name!r}; {hint}"


def type_at(type_: Any, where: Path_) -> inspect.Type:
    """Return the type at ``where`` inside ``type_``."""
    info = inspect.type_info(type_)
    for step in where:
        inner = (_inside(member, step) for member in _members(info))
        info = next((found for found in inner if found is not None), inspect.AnyType())
    return info


def _inside(info: inspect.Type, step: str | int) -> inspect.Type | None:
    if isinstance(info, inspect.StructType):
        return next((field.type for field in info.fields if field.encode_name == step), None)
    if isinstance(info, (inspect.ListType, inspect.VarTupleType)):
        return info.item_type if isinstance(step, int) else None
    if isinstance(info, inspect.TupleType):
        return info.item_types[step] if isinstance(step, int) and step < len(info.item_types) else None
    return info.value_type if isinstance(info, inspect.DictType) else None


def at_path(value: Any, where: Path_) -> Any:
    """Return the value at ``where`` inside ``value``, or its nearest parent that exists."""
    for step in where:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return value
    return value


def describe_type(info: inspect.Type) -> str:
    """Return the values that a type allows: ``a whole number``, ``a list of text``, ``one of raw, fp16, int8``."""
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
        inner = describe_type(info.item_type)
        return "a list" if isinstance(info.item_type, inspect.AnyType) else f"a list of {_plural(inner)}"
    if isinstance(info, inspect.TupleType):
        return f"a list of {len(info.item_types)}: {', '.join(describe_type(item) for item in info.item_types)}"
    if isinstance(info, inspect.StructType):
        keys = _keys(info)
        return f"a group of keys ({', '.join(keys[:6])}{', …' if len(keys) > 6 else ''})"
    if isinstance(info, (inspect.IntType, inspect.FloatType)):
        return ("a whole number" if isinstance(info, inspect.IntType) else "a number") + _bounds(info)
    simple = {inspect.StrType: "text", inspect.BoolType: "true or false", inspect.DictType: "a group of keys"}
    return simple.get(type(info), "something else")


def _bounds(info: inspect.IntType | inspect.FloatType) -> str:
    bounds = {"from": info.ge, "above": info.gt, "to": info.le, "below": info.lt}
    return "".join(f" {words} {bound:.12g}" for words, bound in bounds.items() if bound is not None)


def _plural(inner: str) -> str:
    known = {"a whole number": "whole numbers", "a number": "numbers", "text": "text"}
    return known.get(inner, re.sub(r"^a (group|list) of", r"\1s of", inner))


def _members(info: inspect.Type) -> tuple[inspect.Type, ...]:
    if isinstance(info, inspect.Metadata):
        return _members(info.type)
    return sum(map(_members, info.types), ()) if isinstance(info, inspect.UnionType) else (info,)


def _keys(info: inspect.Type) -> list[str]:
    struct = next((member for member in _members(info) if isinstance(member, inspect.StructType)), None)
    return [field.encode_name for field in struct.fields] if struct is not None else []


def _path(at: str) -> Path_:
    steps = re.findall(r"\.([^.\[\]`]+)|\[(\d+|\.\.\.)\]", at)
    return tuple(name or (int(index) if index.isdigit() else 0) for name, index in steps)


def shorten(value: Any) -> str:
    """Return a value as a user would have written it, abbreviated if it is long."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "empty"
    if isinstance(value, dict):
        return "a group of keys"
    text = repr(value)
    if len(text) <= SHOWN:
        return text
    return f"a list of {len(value)}" if isinstance(value, list) else text[: SHOWN - 1] + "…"


def decode_json(raw: bytes, type_: type[T], schema: int) -> T:
    """Decode a JSON document that names its schema; raise :class:`InvalidDocument` if it is not as it should be."""
    try:
        found = msgspec.json.decode(raw, type=dict).get("schema")
        if found == schema:
            return msgspec.json.decode(raw, type=type_)
        shown = repr(found)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: UTF-8, or digits of an integer
        raise _json_fault(raw, type_, error) from None
    raise OtherSchema(f" has schema {shown}, this ls-edge reads schema {schema}")


def _json_fault(raw: bytes, type_: type[Any], error: Exception) -> InvalidDocument:
    try:
        value = json.loads(raw)
    except json.JSONDecodeError as wrong:
        problem = f"{wrong.msg[:1].lower()}{wrong.msg[1:]}"
        return InvalidDocument(f":{wrong.lineno}:{wrong.colno}: not JSON, {problem}")
    except (ValueError, RecursionError):
        return InvalidDocument(": not JSON, or nested too deeply, or with numbers of thousands of digits")
    invalid = explain(str(error), value, type_)
    steps = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in invalid.where)
    inside = f" (at {steps.lstrip('.')})" if len(invalid.where) > 1 else ""
    return InvalidDocument(f"{_json_place(raw, invalid)}: {invalid.text}{inside}")


def _json_place(raw: bytes, found: InvalidValue) -> str:
    """Return ``:line:column`` of the key of an invalid value, if the document has this key only once."""
    name = next((step for step in reversed(found.where) if isinstance(step, str)), None)
    if name is None:
        return ":1:1"
    hits = [match.start() for match in re.finditer(re.escape(json.dumps(name).encode()) + rb"\s*:", raw)]
    if len(hits) != 1:
        return ""
    lines = raw[: hits[0]].split(b"\n")
    return f":{len(lines)}:{len(lines[-1]) + 1}"
