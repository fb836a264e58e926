"""Authentication: the ZAP handler (RFC 27) of the CURVE sockets of this process.

A client whose public key is in ``peers.yaml`` is admitted under the name that the key belongs to; its messages then
carry that name as their ``User-Id``. All other clients are refused, counted, and logged with their address.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

import zmq
import zmq.utils.z85

log = logging.getLogger("ls_edge.runtime")

MAX_ADDRESSES = 1024
"""Largest number of addresses whose refusals are counted separately."""
_ENDPOINT = "inproc://zeromq.zap.01"


def is_worth_logging(count: int) -> bool:
    """Return whether to log an event that happens for the ``count``-th time: the 1st, 2nd, 4th, 8th and so on."""
    return count & (count - 1) == 0


class ZapHandler:
    """A handler of ZAP requests on the caller's loop: poll :attr:`socket`, call :meth:`answer`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], names_by_key: Mapping[bytes, str]) -> None:
        """Admit the keys of ``names_by_key``, which maps a public key in Z85 to its name in ``peers.yaml``."""
        self.refused: Counter[str] = Counter()
        """Refusals of the first :data:`MAX_ADDRESSES` addresses; those of all others are under ``""``."""
        self.refusals = 0
        self.change(names_by_key)
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ENDPOINT)

    def change(self, names_by_key: Mapping[bytes, str]) -> None:
        """Admit these keys from now on; connections that exist stay."""
        self._names = {zmq.utils.z85.decode(key): name for key, name in names_by_key.items()}

    def answer(self) -> None:
        """Answer one request."""
        frames = self.socket.recv_multipart()
        request_id = frames[1] if len(frames) > 1 else b""
        name = None
        if len(frames) >= 7 and frames[0] == b"1.0" and frames[5] == b"CURVE":
            name = self._names.get(frames[6])
        address = frames[3].decode("ascii", "replace") if len(frames) > 3 else "?"
        if name is None:
            self.refusals += 1
            if address not in self.refused and len(self.refused) >= MAX_ADDRESSES:
                address = ""
            self.refused[address] += 1
            if is_worth_logging(self.refused[address]):
                log.warning(
                    "refused a connection",
                    extra={
                        "address": address or "others",
                        "why": "its key is not in peers.yaml",
                        "count": self.refused[address],
                    },
                )
            self.socket.send_multipart([b"1.0", request_id, b"400", b"key not in peers.yaml", b"", b""])
        else:
            self.socket.send_multipart([b"1.0", request_id, b"200", b"OK", name.encode(), b""])

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()
