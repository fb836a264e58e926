"""YAML files that users write, read strictly, with the place of an error.

:func:`load` parses a file, refuses a key that stands twice, converts it to a ``msgspec`` struct and turns every
complaint into one line with file, line and column. Meaning (does the name exist, do the keys fit together) is
the caller's to check, with :meth:`Places.error`.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from ls_edge.errors import ConfigError

T = TypeVar("T")
Path_ = tuple[str | int, ...]

MAX_DEPTH = 20
MAX_VALUES = 100_000
"""Limits of a file, far above what settings need."""


class Places:
    """Where each key and value of a file stands, by its path such as ``("peers", 0, "blocks")``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.marks: dict[Path_, tuple[int, int]] = {}
        self.key_marks: dict[Path_, tuple[int, int]] = {}

    def error(self, message: str, *where: str | int, key: bool = False) -> ConfigError:
        """Make a :class:`ConfigError` at the value (or ``key``) of this path, or at its nearest parent."""
        marks = self.key_marks if key else self.marks
        for end in range(len(where), -1, -1):
            mark = marks.get(where[:end]) or self.marks.get(where[:end])
            if mark is not None:
                return ConfigError(message, path=self.path, line=mark[0], column=mark[1])
        return ConfigError(message, path=self.path)


def load(path: str | Path, type_: type[T]) -> tuple[T, Places]:
    """Read ``path`` as ``type_``; raises :class:`ConfigError` for whatever keeps it from being one."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError("no such file; check the path", path=path) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 text (byte {error.start}); save it as UTF-8", path=path) from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", path=path) from None
    places = Places(path)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        problem = f"not YAML: {error.problem or error.context}"
        raise ConfigError(
            problem, path=path, line=mark.line + 1 if mark else None, column=mark.column + 1 if mark else None
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"not YAML: {str(error).splitlines()[0]}", path=path) from None
    except RecursionError:
        raise ConfigError(f"deeper than {MAX_DEPTH} levels; write it plainly", path=path) from None
    plain = {} if node is None else _plain(node, (), places)
    try:
        return msgspec.convert(plain, type_), places
    except msgspec.ValidationError as error:
        raise _explain(str(error), places, type_) from None


def _plain(node: yaml.Node, where: Path_, places: Places) -> Any:
    if len(where) > MAX_DEPTH or len(places.marks) > MAX_VALUES:  # aliases make small files endless
        raise places.error(
            f"nested deeper than {MAX_DEPTH} levels or of more than {MAX_VALUES} values; write it plainly"
        )
    places.marks[where] = (node.start_mark.line + 1, node.start_mark.column + 1)
    if isinstance(node, yaml.MappingNode):
        result: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = _scalar(key_node, where, places) if isinstance(key_node, yaml.ScalarNode) else None
            here = (*where, key if isinstance(key, str) else str(key))
            mark = (key_node.start_mark.line + 1, key_node.start_mark.column + 1)
            if key in result:
                raise ConfigError(f"{key!r} stands twice; keep one", path=places.path, line=mark[0], column=mark[1])
            places.key_marks[here] = mark
            result[key] = _plain(value_node, here, places)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*where, index), places) for index, item in enumerate(node.value)]
    return _scalar(node, where, places)


def _scalar(node: yaml.Node, where: Path_, places: Places) -> Any:
    try:
        return yaml.SafeLoader("").construct_object(node)
    except (yaml.YAMLError, ValueError):
        raise places.error(f"{node.value!r} cannot be read as a value; put it in quotes", *where) from None


def _explain(message: str, places: Places, type_: type[Any]) -> ConfigError:
    text, _, at = message.partition(" - at `$")
    where: list[str | int] = []
    for name, index in re.findall(r"\.([^.\[\]`]+)|\[(\d+|\.\.\.)\]", at.rstrip("`")):
        where.append(name if name else int(index) if index.isdigit() else 0)
    unknown = re.search(r"unknown field `(.+?)`", text)
    if unknown:
        known = _fields_at(type_, where)
        near = difflib.get_close_matches(unknown[1], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
        return places.error(f"unknown key {unknown[1]!r}; {hint}", *where, unknown[1], key=True)
    missing = re.search(r"missing required field `(.+?)`", text)
    if missing:
        return places.error(f"the key {missing[1]!r} is missing here; add it", *where)
    return places.error(f"{text[0].lower()}{text[1:]}{f' for {where[-1]!r}' if where else ''}", *where)


def _fields_at(type_: Any, where: list[str | int]) -> list[str]:
    """Names of the fields of the struct that stands at ``where`` inside ``type_``."""
    info = msgspec.inspect.type_info(type_)
    for step in where:
        info = _unwrap(info)
        if isinstance(info, msgspec.inspect.StructType):
            info = next(field.type for field in info.fields if field.encode_name == step)
        elif isinstance(info, (msgspec.inspect.ListType, msgspec.inspect.VarTupleType)):
            info = info.item_type
        elif isinstance(info, msgspec.inspect.DictType):
            info = info.value_type
    info = _unwrap(info)
    return [field.encode_name for field in info.fields] if isinstance(info, msgspec.inspect.StructType) else []


def _unwrap(info: msgspec.inspect.Type) -> msgspec.inspect.Type:
    if isinstance(info, msgspec.inspect.UnionType):
        return next((t for t in info.types if not isinstance(t, msgspec.inspect.NoneType)), info)
    return info
