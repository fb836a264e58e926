"""Connections are ended by their descriptor, which may belong to somebody else by then."""

import os
import socket

import pytest

from ls_edge.runtime.transport.poller import abort, abort_if_to_itself


def test_descriptors_of_others_are_left_alone():
    before = set(os.listdir("/proc/self/fd"))
    reading, writing = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as ours:
        accepted, _ = listening.accept()
        with accepted:
            port = ours.getsockname()[1]
            socket.setdefaulttimeout(5)
            for descriptor in (reading, writing, ours.fileno(), accepted.fileno(), 9999):
                assert not abort_if_to_itself(descriptor)
                assert not abort(descriptor, port + 1 if descriptor == ours.fileno() else port)
            assert os.get_blocking(accepted.fileno())
            accepted.sendall(b"x")
            assert ours.recv(1) == b"x"
            assert abort(accepted.fileno(), listening.getsockname()[1])
            with pytest.raises(ConnectionResetError):
                ours.recv(1)
    socket.setdefaulttimeout(None)
    os.close(writing)
    assert os.read(reading, 1) == b""  # no duplicate keeps it open
    os.close(reading)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_datagram_socket_with_the_number_and_the_port_of_a_connection_is_left_alone():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ours, socket.socket(type=socket.SOCK_DGRAM) as other:
        for one in (ours, other):
            one.bind(("127.0.0.1", 0))
        ours.connect(other.getsockname())
        assert not abort(ours.fileno(), ours.getsockname()[1])
        ours.send(b"x")
        assert other.recv(1) == b"x"
