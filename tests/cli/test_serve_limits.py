"""Limits of the HTTP server for clients that are slow, that never read, or that send too much."""

import asyncio
import contextlib
import socket
import time

import pytest

from ls_edge.runtime.serve.listener import open_listener
from ls_edge.runtime.serve.server import MAX_HTTP_HEADER, MAX_PIPELINED, HttpServer

RECEIVE_S = 0.4
LARGE = 32 << 20
"""Bytes of a response, beyond what sockets buffer."""
GET = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n"


async def application(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    if scope["path"] == "/long":
        await asyncio.sleep(3 * RECEIVE_S)
    body = bytes(LARGE) if scope["path"] == "/large" else b"answer"
    length = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
def connect():
    listener = open_listener("127.0.0.1:0", "--http")
    with HttpServer(listener, application, max_connections=4, receive_s=RECEIVE_S), contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(socket.create_connection(listener.getsockname(), timeout=10))


def read_all(connection):
    """What comes until the server closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 20):
            received += part
    return received


@pytest.mark.parametrize(
    ("sent", "answers"),
    [
        (b"", 0),
        (GET[:20], 0),
        (POST + b"12345", 0),
        (GET % b"", 1),
        (GET % b"" + POST, 1),  # the second request has come, but not its body
        (GET % b"" * 3 + POST + b"1", 3),
        (POST + b"1234567890" + GET[:20], 1),
    ],
)
def test_a_connection_without_a_whole_request_is_closed(connect, sent, answers):
    connection, began = connect(), time.monotonic()
    connection.sendall(sent)
    assert read_all(connection).count(b"answer") == answers
    assert 0.8 * RECEIVE_S < time.monotonic() - began < 5


def test_a_byte_now_and_then_does_not_help(connect):
    connection, began = connect(), time.monotonic()
    with contextlib.suppress(ConnectionError):
        for byte in GET[:-4] + b"\r\nX: " + 100 * b"x":
            connection.sendall(bytes([byte]))
            time.sleep(0.05)
    assert RECEIVE_S * 0.8 < time.monotonic() - began < 5  # of 6 s for all bytes


def test_an_answer_may_take_longer(connect):
    connection = connect()
    connection.sendall(GET % b"long" + GET % b"")
    assert read_all(connection).count(b"answer") == 2


@pytest.mark.parametrize("requests", [[b"large"], [b"large", b""], [b"large"] * 4])
def test_a_client_that_never_reads_is_closed(connect, requests):
    connection = connect()
    for path in requests:
        connection.sendall(GET % path)
        time.sleep(0.1)
    time.sleep(2 * RECEIVE_S)
    assert len(read_all(connection)) < LARGE


def test_a_client_that_reads_slowly_gets_its_answer(connect):
    connection, received, began = connect(), 0, time.monotonic()
    connection.sendall(GET % b"large")
    while received < LARGE:
        part = connection.recv(1 << 20)
        assert part
        received += len(part)
        time.sleep(0.005)
    assert time.monotonic() - began > 0.1


def test_headers_trailers_and_pipelines_are_limited(connect):
    chunked = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    for start in (b"GET /", GET[:-2] % b"" + b"X: ", chunked + b"1;", chunked + b"1\r\nx\r\n0\r\nX: "):
        connection = connect()
        with contextlib.suppress(ConnectionError):
            connection.sendall(start)
            for _ in range(200):
                connection.sendall(b"x" * MAX_HTTP_HEADER)
        assert read_all(connection)[:12] in (b"HTTP/1.1 400", b"")
        connection.close()
    connection = connect()
    connection.sendall(GET % b"long" + GET % b"" * 10 * MAX_PIPELINED)
    assert read_all(connection) == b""


def test_further_connections_are_closed(connect):
    connections = [connect() for _ in range(6)]
    time.sleep(0.2)
    for connection in connections:
        with contextlib.suppress(ConnectionError):
            connection.sendall(GET % b"")
    assert sum(b"answer" in read_all(connection) for connection in connections) == 4
