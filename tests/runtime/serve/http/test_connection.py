"""Limits of a connection for clients that are slow, that never read, that close one side, or that send too much."""

import asyncio
import contextlib
import json
import re
import socket
import ssl
import threading

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from ls_edge.runtime.serve.http import connection as module
from ls_edge.runtime.serve.http.access import Access
from ls_edge.runtime.serve.http.bodies import BodyReader
from ls_edge.runtime.serve.http.listener import open_listener
from ls_edge.runtime.serve.http.router import Route, Router, begin_response
from ls_edge.runtime.serve.http.server import Certificate, HttpServer

LIMIT_S = 0.3
"""Time that a client gets in these tests, in seconds."""
LARGE = 32 << 20
"""Bytes of a response, beyond what sockets buffer."""
GET = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n"


class Requests:
    """Requests that a server answers when the test says so, and how each ended."""

    def __init__(self):
        self.begun, self.ended = threading.Semaphore(0), threading.Semaphore(0)
        self.cancelled = 0
        self._release = threading.Event()

    def release(self):
        """Answer all of them."""
        self._release.set()

    async def hold(self, _request):
        self.begun.release()
        try:
            while not self._release.is_set():
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.ended.release()
        return web.Response(body=b"answer")


async def quick(_request):
    return web.Response(body=b"answer")


async def large(_request):
    return web.Response(body=bytes(LARGE))


async def medium(_request):
    return web.Response(body=bytes(40_000))


@pytest.fixture
def held():
    return Requests()


@pytest.fixture
def connect(serve_routes, held):
    """Connect to a server with short limits."""
    bodies = BodyReader(1 << 20, LIMIT_S)

    async def echo(request):
        with await bodies.read(request) as body:
            body.seek(0)
            return web.Response(body=b"answer " + body.read())

    routes = [
        ("GET", "/", quick),
        ("GET", "/held", held.hold),
        ("GET", "/large", large),
        ("GET", "/medium", medium),
        ("POST", "/echo", echo),
    ]
    address = serve_routes(routes, idle_s=3 * LIMIT_S, receive_s=LIMIT_S)
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(socket.create_connection(address, timeout=30))


def read_all(connection):
    """What comes until the server closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 20):
            received += part
    return received


def statuses(received):
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d+)", received)]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"", []),
        (GET[:20], [408]),
        (POST + b"12345", [408]),
        (GET % b"", [200]),
        (GET % b"" + POST, [200, 408]),  # the second request has come, but not its body
        (GET % b"" * 3 + POST + b"1", [200, 200, 200, 408]),
        (POST + b"1234567890" + GET[:20], [200]),
    ],
)
def test_connection_without_whole_request_is_closed(connect, sent, expected):
    connection = connect()
    connection.sendall(sent)
    received = read_all(connection)
    assert statuses(received) == expected
    if expected[-1:] == [408]:
        header, _, body = received[received.rindex(b"HTTP/1.1 408") :].partition(b"\r\n\r\n")
        assert int(re.search(rb"Content-Length: (\d+)", header)[1]) == len(body)
        assert "send it faster" in json.loads(body)["error"]


def test_time_of_a_header_does_not_restart_with_each_byte(connect):
    connection = connect()
    over = threading.Event()

    def drip():
        with contextlib.suppress(OSError):
            for _ in range(10_000):
                connection.sendall(b"x")
                if over.wait(0.02):
                    return

    connection.sendall(GET[:-2] % b"" + b"X: ")
    thread = threading.Thread(target=drip)
    thread.start()
    try:
        assert statuses(read_all(connection)) in ([408], [])
    finally:
        over.set()
        thread.join()


def test_idle_connection_is_kept_longer_than_proxies_keep_theirs():
    assert module.IDLE_S > 60


def test_request_that_begins_late_gets_its_whole_time(serve_routes):
    """The time of an idle connection ends with the first byte of a request."""
    begun = threading.Event()
    bodies = BodyReader(1 << 20, 30.0)

    async def upload(request):
        begun.set()
        with await bodies.read(request) as body:
            return web.Response(body=b"%d" % body.seek(0, 2))

    address = serve_routes([("GET", "/", quick), ("POST", "/echo", upload)], idle_s=LIMIT_S, receive_s=30.0)
    with socket.create_connection(address, timeout=30) as connection:
        connection.sendall(GET % b"")
        assert connection.recv(1 << 16).endswith(b"answer")
        connection.sendall(POST[:30])
        with socket.create_connection(address, timeout=30) as other:  # its time is over when that of the first was
            assert read_all(other) == b""
        connection.sendall(POST[30:])
        assert begun.wait(30)
        with socket.create_connection(address, timeout=30) as other:
            assert read_all(other) == b""
        connection.sendall(b"1234567890")
        assert connection.recv(1 << 16).endswith(b"10")


def test_answer_may_take_longer_than_a_client(connect, held):
    connection = connect()
    connection.sendall(GET % b"held" + GET % b"")
    assert held.begun.acquire(timeout=30)
    assert read_all(connect()) == b""  # an idle connection has ended meanwhile
    held.release()
    assert read_all(connection).count(b"answer") == 2


@pytest.mark.parametrize("requests", [[b"large"], [b"large", b""], [b"large"] * 4, [b"medium"] * 2000])
def test_client_that_never_reads_is_closed(serve_routes, requests):
    closed = threading.Event()

    class Watched(module.Connections):
        def remove(self, connection):
            super().remove(connection)
            closed.set()

    address = serve_routes(
        [("GET", "/", quick), ("GET", "/large", large), ("GET", "/medium", medium)], kind=Watched, receive_s=LIMIT_S
    )
    with socket.create_connection(address, timeout=30) as connection:
        with contextlib.suppress(OSError):  # it is closed
            for path in requests:
                connection.sendall(GET % path)
        assert closed.wait(30)


def test_client_that_reads_in_pieces_gets_all(serve_routes):
    address, received = serve_routes([("GET", "/large", large)]), 0
    with socket.create_connection(address, timeout=30) as connection:
        connection.sendall(GET % b"large")
        while received < LARGE:
            part = connection.recv(1 << 12)
            assert part
            received += len(part)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_half_closed_client_gets_its_answers(connect, held, version):
    connection = connect()
    connection.sendall((GET % b"held").replace(b"1.1", version))
    connection.shutdown(socket.SHUT_WR)
    assert held.begun.acquire(timeout=30)
    held.release()
    assert [status for status in statuses(read_all(connection)) if status != 100] == [200]
    assert held.cancelled == 0


def test_half_closed_client_gets_the_answers_to_all_its_requests(connect):
    connection = connect()
    connection.sendall(GET % b"" * 3 + POST + b"1234567890")
    connection.shutdown(socket.SHUT_WR)
    assert statuses(read_all(connection)) == [200] * 4


def test_interim_responses_go_to_half_closed_clients_alone(connect, held):
    first, second = connect(), connect()
    for one in (first, second):
        one.sendall(GET % b"held")
        assert held.begun.acquire(timeout=30)
    second.shutdown(socket.SHUT_WR)
    assert second.recv(1 << 16).startswith(b"HTTP/1.1 100 ")
    held.release()
    assert statuses(read_all(first)) == [200]


@pytest.mark.parametrize("sent", [POST + b"12345", GET[:20], b""])
def test_half_closed_client_whose_request_is_not_whole_is_closed(connect, sent):
    connection = connect()
    connection.sendall(sent)
    connection.shutdown(socket.SHUT_WR)
    assert 200 not in statuses(read_all(connection))


@pytest.mark.parametrize("behind", [b"", GET % b""])
def test_client_that_goes_away_cancels_its_request(connect, held, behind):
    connection = connect()
    connection.sendall(GET % b"held" + behind)
    assert held.begun.acquire(timeout=30)
    connection.close()
    assert held.ended.acquire(timeout=30)
    assert held.cancelled == 1


def test_client_that_goes_away_ends_its_stream(serve_routes):
    ended = threading.Event()

    async def stream(request):
        response = web.StreamResponse()
        try:
            await begin_response(request, response)
            while True:
                await response.write(b"event")
                await asyncio.sleep(0.01)
        finally:
            ended.set()

    address = serve_routes([("GET", "/", stream)])
    with socket.create_connection(address, timeout=30) as connection:
        connection.sendall(GET % b"" * 2)
        assert connection.recv(1)
    assert ended.wait(30)


def test_end_of_a_last_response_does_not_wait_for_ever(serve_routes):
    """An HTTP/1.0 connection closes after its response, of which a part waits in the server."""
    closed = threading.Event()

    class Watched(module.Connections):
        def remove(self, connection):
            super().remove(connection)
            closed.set()

    address = serve_routes([("GET", "/", large)], kind=Watched, receive_s=LIMIT_S)
    with socket.create_connection(address, timeout=30) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n" + GET % b"")
        assert closed.wait(30)


def test_headers_and_trailers_are_limited(connect):
    chunked = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    for start in (b"GET /", GET[:-2] % b"" + b"X: ", chunked + b"1;", chunked + b"1\r\nx\r\n0\r\nX: "):
        connection = connect()
        with contextlib.suppress(ConnectionError):
            connection.sendall(start)
            for _ in range(200):
                connection.sendall(b"x" * 16384)
        assert set(statuses(read_all(connection))) <= {400, 408}  # an extension of a chunk is skipped, but not for ever
        connection.close()
    connection = connect()
    with contextlib.suppress(ConnectionError):
        connection.sendall(GET[:-2] % b"" + b"X: y\r\n" * 10_000)
    assert set(statuses(read_all(connection))) <= {400}


def test_client_that_does_not_agree_on_tls_is_closed(serve_routes, certificate):
    address = serve_routes([("GET", "/", quick)], tls=Certificate(*certificate), handshake_s=LIMIT_S)
    for sent in (b"", b"\x16\x03\x01", GET % b""):
        with socket.create_connection(address, timeout=30) as connection:
            connection.sendall(sent)
            assert b"answer" not in read_all(connection)


def test_server_does_not_wait_for_clients_that_do_not_confirm_the_end_of_tls(certificate):
    router = Router([Route("GET", "/", quick)], Access(loopback_only=True), CollectorRegistry(), access_log=False)
    listener = open_listener("127.0.0.1:0", "--http")
    address, context = listener.getsockname(), ssl.create_default_context(cafile=certificate[0])
    server = HttpServer(listener, router, module.Connections(4), tls=Certificate(*certificate))
    with (
        server,
        context.wrap_socket(socket.create_connection(address, timeout=30), server_hostname="localhost") as client,
    ):
        client.sendall(GET % b"")
        assert client.recv(1 << 16).endswith(b"answer")
        assert server.drain(20.0)


def test_idle_connection_makes_place_for_another(connect):
    idle = connect()
    others = [connect() for _ in range(4)]
    assert read_all(idle) == b""
    for connection in others:
        connection.sendall(GET % b"")
        assert connection.recv(1 << 16).endswith(b"answer")


def test_connections_beyond_the_limit_are_closed_while_all_are_in_use(connect, held):
    busy = [connect() for _ in range(4)]
    for connection in busy:
        connection.sendall(GET % b"held")
        assert held.begun.acquire(timeout=30)
    assert read_all(connect()) == b""
    held.release()
    assert all(read_all(connection).endswith(b"answer") for connection in busy)


def test_clients_that_do_not_agree_on_tls_count_against_the_limit(serve_routes, certificate):
    address = serve_routes([("GET", "/", quick)], tls=Certificate(*certificate), most=4)
    context = ssl.create_default_context(cafile=certificate[0])
    with contextlib.ExitStack() as stack:

        def connect():
            return stack.enter_context(socket.create_connection(address, timeout=30))

        used = stack.enter_context(context.wrap_socket(connect(), server_hostname="localhost"))
        silent = [connect() for _ in range(12)]
        for connection in silent[:8]:
            assert read_all(connection) == b""
        with context.wrap_socket(connect(), server_hostname="localhost") as another:
            another.sendall(GET % b"")
            assert another.recv(1 << 16).endswith(b"answer")
        assert read_all(used) == b""


def test_request_that_comes_with_the_end_of_the_handshake_is_answered(serve_routes, certificate):
    address = serve_routes([("GET", "/", quick)], tls=Certificate(*certificate))
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context(cafile=certificate[0]).wrap_bio(received, sent, server_hostname="localhost")
    with socket.create_connection(address, timeout=30) as connection:

        def read(function, *arguments):
            while True:
                try:
                    return function(*arguments)
                except ssl.SSLWantReadError:
                    connection.sendall(sent.read())
                    part = connection.recv(1 << 16)
                    assert part
                    received.write(part)

        read(client.do_handshake)
        client.write(GET % b"")
        assert read(client.read, 1 << 16).endswith(b"answer")
