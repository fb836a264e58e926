"""Authentication: the ZAP handler (RFC 27) of the CURVE sockets of this process.

A client whose public key is in ``peers.yaml`` is admitted under the name that the key belongs to; its messages then
carry that name as their ``User-Id``. All other clients are refused, counted, and logged with their address.
"""

from __future__ import annotations

from collections.abc import Mapping

import zmq
import zmq.utils.z85

from ls_edge.core.logs import LoggedCounts

MAX_ADDRESSES = 1024
"""Largest number of addresses whose refusals are counted separately."""
_ENDPOINT = "inproc://zeromq.zap.01"


class ZapHandler:
    """A handler of ZAP requests on the caller's loop: poll :attr:`socket`, call :meth:`answer`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], names_by_key: Mapping[bytes, str]) -> None:
        """Admit the keys of ``names_by_key``, which maps a public key in Z85 to its name in ``peers.yaml``."""
        self.refused = LoggedCounts()
        """Refusals of the first :data:`MAX_ADDRESSES` addresses; those of all others are under ``""``."""
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
            if address not in self.refused and len(self.refused) >= MAX_ADDRESSES:
                address = ""
            why = "its key is not in peers.yaml"
            self.refused.note(address, "refused a connection", address=address or "others", why=why)
            self.socket.send_multipart([b"1.0", request_id, b"400", b"key not in peers.yaml", b"", b""])
        else:
            self.socket.send_multipart([b"1.0", request_id, b"200", b"OK", name.encode(), b""])

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()
