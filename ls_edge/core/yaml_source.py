"""YAML files that users write, read strictly, with the place of each error.

:func:`load` parses a file, refuses duplicate keys, converts it to a ``msgspec`` struct and reports an error in one line
with file, line and column. The caller checks relations between values, with :meth:`SourceMap.error`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from ls_edge.core import validation
from ls_edge.core.errors import ConfigError, UsageError
from ls_edge.core.files import read_file

T = TypeVar("T")
Path_ = tuple[str | int, ...]

MAX_DEPTH = 20
MAX_VALUES = 100_000
MAX_BYTES = 4_000_000


class SourceMap:
    """Lines and columns of keys and values in a file, by their path such as ``("peers", 0, "blocks")``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.marks: dict[Path_, tuple[int, int]] = {}
        self.key_marks: dict[Path_, tuple[int, int]] = {}
        self.written: dict[Path_, str] = {}
        """The text of values that are not in quotes."""

    def error(self, message: str, *where: str | int, key: bool = False) -> ConfigError:
        """Make a :class:`ConfigError` at the value (or ``key``) of a path, or at its nearest parent."""
        marks = self.key_marks if key else self.marks
        for end in range(len(where), -1, -1):
            mark = marks.get(where[:end]) or self.marks.get(where[:end])
            if mark is not None:
                return ConfigError(message, path=self.path, line=mark[0], column=mark[1])
        return ConfigError(message, path=self.path)


def parse(path: Path) -> tuple[str, yaml.Node | None]:
    """Return the text of a YAML file and its top node, None if it is empty; raise :class:`ConfigError`."""
    try:
        text = read_file(path, MAX_BYTES).decode("utf-8").removeprefix("\ufeff")  # editors on Windows write it first
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 text (byte {error.start}); save it as UTF-8", path=path) from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}; check the path", path=path) from None
    try:
        return text, yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        problem = f"not YAML: {_plainly(error.problem or error.context or '')}"
        raise ConfigError(
            problem, path=path, line=mark.line + 1 if mark else None, column=mark.column + 1 if mark else None
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"not YAML: {str(error).splitlines()[0]}", path=path) from None
    except RecursionError:
        raise ConfigError(f"deeper than {MAX_DEPTH} levels; simplify it", path=path) from None


def load(path: str | Path, type_: type[T]) -> tuple[T, SourceMap]:
    """Read ``path`` as ``type_``; raise :class:`ConfigError` if that is not possible.

    Types of the struct that msgspec does not know have a class method ``parse`` that raises ValueError.
    """
    path = Path(path)
    source_map = SourceMap(path)
    _, node = parse(path)
    plain = None if node is None else _plain(node, (), source_map)
    empty = plain is None
    plain = {} if empty else plain
    try:
        return msgspec.convert(plain, type_, dec_hook=lambda kind, value: kind.parse(value)), source_map
    except msgspec.ValidationError as error:
        if empty:
            raise ConfigError(
                f"the file is empty: {validation.explain(str(error), {}, type_).text}", path=path
            ) from None
        raise _explain(str(error), plain, source_map, type_) from None


def parse_value(text: str, what: str) -> Any:
    """Read a value as it would be read in a file; raise :class:`UsageError` that begins with ``what``."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        return None if node is None else _plain(node, (), SourceMap(Path(what)))
    except yaml.YAMLError:
        raise UsageError(f"{what}: not YAML; put the value in quotes") from None
    except ConfigError as error:
        raise UsageError(str(error)) from None


def _plainly(problem: str) -> str:
    """Return the parser's error with its tokens in words."""
    if r"'\t'" in problem:
        return "a line is indented with a tab; use spaces"
    for token, words in (
        ("<stream end>", "the end of the file"),
        ("<block end>", "a line further left"),
        ("<block mapping start>", "a key"),
        ("<scalar>", "a value"),
    ):
        problem = problem.replace(f"'{token}'", words).replace(token, words)
    return problem


def _plain(node: yaml.Node, where: Path_, source_map: SourceMap) -> Any:
    if len(where) > MAX_DEPTH or len(source_map.marks) > MAX_VALUES:  # aliases make small files endless
        raise source_map.error(f"deeper than {MAX_DEPTH} levels or more than {MAX_VALUES} values; simplify it")
    source_map.marks[where] = (node.start_mark.line + 1, node.start_mark.column + 1)
    if isinstance(node, yaml.MappingNode):
        result: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            mark = (key_node.start_mark.line + 1, key_node.start_mark.column + 1)
            key = _scalar(key_node, where, source_map, is_key=True) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                shown = repr(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "a list or group of keys"
                raise ConfigError(
                    f"the key {shown} is not text; put it in quotes, or correct it",
                    path=source_map.path,
                    line=mark[0],
                    column=mark[1],
                )
            here = (*where, key)
            source_map.key_marks[here] = mark
            if key in result:
                raise source_map.error(f"the key {key!r} is there twice; keep one", *here, key=True)
            result[key] = _plain(value_node, here, source_map)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*where, index), source_map) for index, item in enumerate(node.value)]
    return _scalar(node, where, source_map)


_EXPONENT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+")
"""Numbers such as ``1e-3``, which are text in YAML 1.1."""


def _scalar(node: yaml.Node, where: Path_, source_map: SourceMap, *, is_key: bool = False) -> Any:
    unquoted = isinstance(node, yaml.ScalarNode) and node.style is None
    if unquoted and not is_key:
        source_map.written[where] = node.value
    try:
        value = yaml.SafeLoader("").construct_object(node)
    except (yaml.YAMLError, ValueError):
        raise source_map.error(f"{node.value!r} cannot be read as a value; put it in quotes", *where) from None
    if unquoted and isinstance(value, str) and _EXPONENT.fullmatch(value):
        value = float(value)
    if isinstance(value, (int, float)) and not -(2**63) <= value < 2**63:  # infinity and NaN too
        name = next((step for step in reversed(where) if isinstance(step, str)), "the value")
        raise source_map.error(f"{name} is {node.value}; it has to be a finite number within 64 bits", *where)
    return value


def _explain(message: str, plain: Any, source_map: SourceMap, type_: type[Any]) -> ConfigError:
    found = validation.explain(message, plain, type_, source_map.written)
    return source_map.error(found.text, *found.where, key=found.is_key)
