"""Explain in plain words what is wrong with a value of a file, from the error of :mod:`msgspec`.

``Expected `str | array`, got `int` - at `$.peers[0].blocks` `` becomes "blocks is 7; it has to be a list of whole
numbers or text". What is allowed is read from the type, what is there from the value itself.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from msgspec import inspect

Path_ = tuple[str | int, ...]

SHOWN = 60
"""Longest value that is shown, in characters."""


class InvalidValue(NamedTuple):
    """Why a value is invalid."""

    where: Path_
    """Keys and positions that lead to it, such as ``("peers", 0, "blocks")``."""
    text: str
    is_key: bool = False
    """Whether the key is wrong, not what it holds."""


def explain(message: str, value: Any, type_: Any, *, written: str | None = None) -> InvalidValue:
    """Explain msgspec's ``message`` about ``value`` (plain lists and dictionaries), which was to become a ``type_``.

    ``written`` is how the user wrote the value at fault, where a reader such as YAML's may have made something else.
    """
    text, _, at = message.partition(" - at `")
    where = _path(at)
    unknown = re.search(r"unknown field `(.+)`", text)
    if unknown:
        known = _keys(type_at(type_, where))
        return InvalidValue((*where, unknown[1]), unknown_name("key", unknown[1], known), is_key=True)
    missing = re.search(r"missing required field `(.+)`", text)
    if missing:
        return InvalidValue(where, f"the key {missing[1]!r} is missing here; add it")
    if not text.startswith(("Expected ", "Invalid enum value")):
        return InvalidValue(where, text)  # of the struct's own checks
    found = at_path(value, where)
    expected = type_at(type_, where)
    name = next((step for step in reversed(where) if isinstance(step, str)), "")
    if where and isinstance(where[-1], int):
        name += f"[{where[-1]}]"
    shown = shorten(found) if written is None or isinstance(found, (str, type(None))) else written
    hint = ""
    texts = any(isinstance(member, inspect.StrType) for member in _members(expected))
    if texts and written is not None and not isinstance(found, (str, type(None))):
        hint = f"; put it in quotes: {json.dumps(written)}"
    return InvalidValue(where, f"{name or 'the file'} is {shown}; it has to be {describe_type(expected)}{hint}")


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """``unknown key 'rote'; did you mean 'rate'?``, or what there is where nothing is near."""
    listed = list(known)
    near = difflib.get_close_matches(name, listed, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(listed)}" if listed else "remove it"
    return f"unknown {what} {name!r}; {hint}"


def type_at(type_: Any, where: Path_) -> inspect.Type:
    """The type that stands at ``where`` inside ``type_``."""
    info = type_ if isinstance(type_, inspect.Type) else inspect.type_info(type_)
    for step in where:
        info = next(
            (inner for member in _members(info) if (inner := _inside(member, step)) is not None), inspect.AnyType()
        )
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
    """The value that stands at ``where`` inside ``value``; the nearest one above where it is not there."""
    for step in where:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return value
    return value


_SIMPLE: dict[type[inspect.Type], str] = {
    inspect.IntType: "a whole number", inspect.FloatType: "a number", inspect.StrType: "text",
    inspect.BoolType: "true or false",
}  # fmt: skip


def describe_type(info: inspect.Type) -> str:
    """What a type allows: ``a whole number``, ``a list of text``, ``one of raw, fp16, int8``, joined by "or"."""
    found = dict.fromkeys(
        _describe_member(member) for member in _members(info) if not isinstance(member, inspect.NoneType)
    )
    listed = list(found)
    if len(listed) > 1 and "a number" in listed and "a whole number" in listed:
        listed.remove("a whole number")
    return " or ".join(listed) or "left out"


def _describe_member(info: inspect.Type) -> str:
    if isinstance(info, inspect.LiteralType):
        return f"{'one of ' if len(info.values) > 1 else ''}{', '.join(map(str, info.values))}"
    if isinstance(info, (inspect.ListType, inspect.VarTupleType)):
        inner = describe_type(info.item_type)
        return "a list" if isinstance(info.item_type, inspect.AnyType) else f"a list of {_plural(inner)}"
    if isinstance(info, inspect.TupleType):
        return f"a list of {len(info.item_types)}: {', '.join(describe_type(item) for item in info.item_types)}"
    if isinstance(info, inspect.StructType):
        keys = ", ".join(_keys(info)[:6])
        return f"a group of keys ({keys}{', …' if len(_keys(info)) > 6 else ''})"
    if isinstance(info, inspect.DictType):
        return "a group of keys"
    return _SIMPLE.get(type(info), "something else")


def _plural(inner: str) -> str:
    known = {"a whole number": "whole numbers", "a number": "numbers", "text": "text"}
    return known.get(inner, inner.removeprefix("a ").replace("group of keys", "groups of keys", 1))


def _members(info: inspect.Type) -> tuple[inspect.Type, ...]:
    return tuple(info.types) if isinstance(info, inspect.UnionType) else (info,)


def _keys(info: inspect.Type) -> list[str]:
    struct = next((member for member in _members(info) if isinstance(member, inspect.StructType)), None)
    return [field.encode_name for field in struct.fields] if struct is not None else []


def _path(at: str) -> Path_:
    where: list[str | int] = []
    for name, index in re.findall(r"\.([^.\[\]`]+)|\[(\d+|\.\.\.)\]", at.rstrip("`")):
        where.append(name if name else int(index) if index.isdigit() else 0)
    return tuple(where)


def shorten(value: Any) -> str:
    """A value as a user would have written it, cut where it is long."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "empty"
    if isinstance(value, dict):
        return "a group of keys"
    if isinstance(value, list):
        text = str(value)
        return text if len(text) <= SHOWN else f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def json_fault(raw: bytes, type_: Any, error: Exception) -> tuple[str, str]:
    """Why msgspec could not read ``raw`` as ``type_``: ``:line:column``, empty if unknown, and what is wrong there."""
    try:
        value = json.loads(raw)
    except json.JSONDecodeError as wrong:
        return f":{wrong.lineno}:{wrong.colno}", f"not JSON, {wrong.msg[:1].lower()}{wrong.msg[1:]}"
    except (UnicodeDecodeError, RecursionError):
        return "", "not JSON"
    found = explain(str(error), value, type_)
    inside = f" (at {_dotted(found.where)})" if len(found.where) > 1 else ""
    return _json_place(raw, found), found.text + inside


def _json_place(raw: bytes, found: InvalidValue) -> str:
    """Line and column of the key at fault, by its name where that stands only once."""
    name = next((step for step in reversed(found.where) if isinstance(step, str)), None)
    if name is None:
        return ":1:1"
    hits = [match.start() for match in re.finditer(re.escape(json.dumps(name).encode()) + rb"\s*:", raw)]
    if len(hits) != 1:
        return ""
    line = raw.count(b"\n", 0, hits[0]) + 1
    return f":{line}:{hits[0] - raw.rfind(bytes((10,)), 0, hits[0])}"


def _dotted(where: Path_) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in where).lstrip(".")
