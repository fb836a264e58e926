"""Links to all peers of a ``peers.yaml`` for a process that routes nothing: the base of observer, pusher and prober."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from types import TracebackType
from typing import TypeVar

from ls_edge.core.peers_file import PeersFile
from ls_edge.runtime.protocol import messages as wire
from ls_edge.runtime.protocol.messages import Bye, Hello
from ls_edge.runtime.transport.keys import KeyPair
from ls_edge.runtime.transport.links import Link, Links
from ls_edge.runtime.transport.node import curve_of

_FLUSH_S = 0.02
"""Seconds for which closing waits, so that libzmq's thread writes the last messages."""

Self = TypeVar("Self", bound="Dialler")


class Dialler(ABC):
    """Dials every peer of a file; one thread uses it. A context manager."""

    def __init__(self, peers: PeersFile, hello: Hello, keys: KeyPair | None, *, tokens_frame: int = 0) -> None:
        """Dial; ``tokens_frame`` is the length in bytes of the tokens that may come, 0 where none do.

        Raises :class:`LinkError` for keys that do not fit the file.
        """
        self.peers = peers
        self._hello = hello
        self._links = Links(
            {peer.name: peer.address for peer in peers.peers},
            bind=None,
            heartbeat=peers.heartbeat,
            max_frame=max(wire.MAX_HEADER, tokens_frame),
            tokens_frame=tokens_frame,
            curve=curve_of(peers, hello.name, keys),
        )

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Send BYE to who has greeted, which ends what this process began there, and close the links."""
        for name in self._greeted():
            self._send(name, Bye())
        time.sleep(_FLUSH_S)
        self._links.close()

    @abstractmethod
    def _greeted(self) -> Iterable[str]:
        """Names of the peers that have answered the greeting."""

    def _send(self, name: str, message: wire.Message) -> bool:
        return self._links.send(Link(dialled=name), [wire.encode(message)])
