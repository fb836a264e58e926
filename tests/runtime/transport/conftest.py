"""Sockets for scripts of what a peer hears."""

import pytest
import zmq


@pytest.fixture
def sockets():
    """Sockets that speak ZMTP and know nothing of ls-edge."""
    with zmq.Context() as context:
        opened = []

        def make(kind, *, dial=None, bind=None):
            socket = context.socket(kind)
            socket.linger = 0
            socket.connect(dial) if dial else socket.bind(bind)
            opened.append(socket)
            return socket

        yield make
        for socket in opened:
            socket.close()
