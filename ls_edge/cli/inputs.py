"""Inputs of commands: peers.yaml and keys."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ls_edge.core.errors import LsEdgeError
from ls_edge.core.peers_file import PeersFile, load_peers
from ls_edge.core.text import counted
from ls_edge.runtime.protocol.codecs import codec_of
from ls_edge.runtime.transport.keys import KeyPair, load_secret

if TYPE_CHECKING:
    from ls_edge.runtime.source.source import Source


def open_peers(path: Path) -> PeersFile:
    """Read peers.yaml for a process that dials all peers, and let it open as many files and sockets as it may."""
    file = load_peers(path)
    file.check_codecs(codec_of)
    with contextlib.suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return file


def peers_to_ask(path: Path, secret_key: Path | None) -> tuple[PeersFile, KeyPair | None]:
    """Read peers.yaml and the key of a command that reports problems of peers itself, and turn off the log."""
    logging.getLogger("ls_edge").setLevel(logging.CRITICAL)
    return open_peers(path), None if secret_key is None else load_secret(secret_key)


def reload_source(source: Source, say: Callable[[str], None]) -> None:
    """Make a source read ``peers.yaml`` again, and report the result."""
    try:
        source.reload()
        say(f"read {os.fspath(source.peers.path)} again: {counted(len(source.peers.peers), 'peer')}")
    except LsEdgeError as error:
        say(f"the peers are unchanged: {error}")
