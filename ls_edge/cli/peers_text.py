"""Edits of the text of a ``peers.yaml``, which keep its comments and its style."""

from __future__ import annotations

from pathlib import Path

import yaml

from ls_edge.core.errors import ConfigError, UsageError
from ls_edge.core.files import write_output
from ls_edge.core.peers_file import load_peers, parse_peers
from ls_edge.core.validation import parse_yaml, unknown_name


def with_entry(path: Path, entry: str) -> str:
    """Return the text of a file with another peer, ``entry``, which is a mapping in braces, after the others."""
    text, peers = _peers(path)
    last = peers.value[-1]
    if peers.flow_style:
        at = last.end_mark.index
        return f"{text[:at]}, {entry}{text[at:]}"
    at = _end_of(text, last)
    start = text[:at] if text[:at].endswith("\n") else f"{text[:at]}\n"
    return f"{start}{' ' * peers.start_mark.column}- {entry}\n{text[at:]}"


def without_entry(path: Path, name: str) -> str:
    """Return the text of a file without the peer ``name``; raise :class:`ConfigError` if there is no such peer."""
    text, peers = _peers(path)
    names = [next((value.value for key, value in entry.value if key.value == "name"), "") for entry in peers.value]
    if name not in names:
        raise ConfigError(unknown_name("peer", name, names), path=path)
    if len(names) == 1:
        raise ConfigError(f"{name!r} is the only peer; add another one first", path=path)
    entry = peers.value[names.index(name)]
    if not peers.flow_style:
        start = text.rindex("-", 0, entry.start_mark.index)
        return text[: text.rindex("\n", 0, start) + 1] + text[_end_of(text, entry) :]
    start, end = entry.start_mark.index, entry.end_mark.index
    if entry is peers.value[-1]:
        return text[: text.rindex(",", 0, start)] + text[end:]
    return text[:start] + text[peers.value[names.index(name) + 1].start_mark.index :]


def write_checked(path: Path, text: str) -> None:
    """Replace a file if the new text is a valid ``peers.yaml``; raise :class:`UsageError` otherwise."""
    try:
        parse_peers(text.encode(), path)
    except ConfigError as error:
        raise UsageError(f"not written: {error}") from None
    write_output(path, text)


def _peers(path: Path) -> tuple[str, yaml.SequenceNode]:
    """Return the text of a valid file, and the node of its peers."""
    text, top = parse_yaml(load_peers(path).raw, path)
    assert isinstance(top, yaml.MappingNode)
    peers = next(value for key, value in top.value if key.value == "peers")
    assert isinstance(peers, yaml.SequenceNode)
    return text, peers


def _end_of(text: str, entry: yaml.Node) -> int:
    """Return the index of the line after an entry of a block sequence; comments after the entry stay."""
    end = (
        len(text[: entry.end_mark.index].rstrip()) if not getattr(entry, "flow_style", False) else entry.end_mark.index
    )
    newline = text.find("\n", end)
    return len(text) if newline < 0 else newline + 1
