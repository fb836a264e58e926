"""Limits of the HTTP server for clients that are slow, that never read, or that send too much."""

import asyncio
import contextlib
import socket
import time
from types import SimpleNamespace

import pytest
from starlette.exceptions import HTTPException

from ls_edge.runtime.serve.listener import open_listener
from ls_edge.runtime.serve.live_page import MAX_WATCHERS, LivePage
from ls_edge.runtime.serve.server import MAX_HTTP_HEADER, MAX_PIPELINED, HttpServer
from ls_edge.runtime.serve.service import until_gone

RECEIVE_S = 0.4
LARGE = 32 << 20
"""Bytes of a response, beyond what sockets buffer."""
GET = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n"
LAST_CHUNK = b"\r\nConnection: close\r\n\r\n0\r\n\r\n"


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


def test_the_end_of_a_last_response_does_not_wait_for_ever():
    """A kept-alive HTTP/1.0 connection closes after its first response, whatever the client has sent after it."""
    listener = open_listener("127.0.0.1:0", "--http")
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so a part of the response waits in the server
    with HttpServer(listener, medium, max_connections=1, receive_s=RECEIVE_S), contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.socket())
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(listener.getsockname())
        connection.sendall(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" + GET % b"")
        time.sleep(3 * RECEIVE_S)
        other = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=10))
        other.sendall(GET % b"")
        assert other.recv(12) == b"HTTP/1.1 200"


async def medium(_scope, _receive, send):
    length = 40_000  # less than pauses an application that writes
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % length)]})
    await send({"type": "http.response.body", "body": bytes(length)})


def test_a_client_that_goes_away_ends_its_stream_although_it_has_sent_another_request():
    ends = []

    async def stream(_scope, receive, send):
        gone = asyncio.ensure_future(until_gone(receive))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(100):
            await send({"type": "http.response.body", "body": b"event", "more_body": True})
            if (await asyncio.wait((gone,), timeout=0.02))[0]:
                break
        ends.append(gone.done())

    listener = open_listener("127.0.0.1:0", "--http")
    with (
        HttpServer(listener, stream, max_connections=1),
        socket.create_connection(listener.getsockname()) as connection,
    ):
        connection.sendall(GET % b"")
        assert connection.recv(1)
        connection.sendall(GET % b"")
        time.sleep(0.1)
        connection.close()
        end = time.monotonic() + 10
        while not ends and time.monotonic() < end:
            time.sleep(0.02)
    assert ends == [True]


def test_pages_that_open_together_are_limited_as_well():
    async def refused():
        page = LivePage(SimpleNamespace(is_stopping=False, status=dict))

        async def follow():
            response = await page.events(None)
            await response({"type": "http"}, asyncio.Event().wait, ignore)

        async def ignore(_message):
            pass

        pages = [asyncio.ensure_future(follow()) for _ in range(MAX_WATCHERS + 3)]
        await asyncio.sleep(0.2)
        done = [page.exception() for page in pages if page.done()]
        for one in pages:
            one.cancel()
        await asyncio.gather(*pages, return_exceptions=True)
        return [type(error) for error in done], page.watchers

    assert asyncio.run(refused()) == ([HTTPException] * 3, 0)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nConnection: close\r\nHost: localhost\r\nHost: other\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nConnection: close\r\nHost: localhost\r\n\r\n", b"200"),
        (b"GET / HTTP/1.0\r\n\r\n", b"200"),
        (POST[:-4].replace(b"Content-Length: 10", b"Transfer-Encoding: gzip, chunked") + LAST_CHUNK, b"400"),
        (POST[:-4].replace(b"Content-Length: 10", b"Transfer-Encoding: Chunked") + LAST_CHUNK, b"200"),
    ],
)
def test_a_request_names_one_host_and_no_coding_that_is_unknown(connect, sent, status):
    connection = connect()
    connection.sendall(sent)
    assert read_all(connection).startswith(b"HTTP/1.1 " + status)


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
