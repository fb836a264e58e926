"""``ls-edge serve`` in operation: tokens, TLS, hosts, reloading, logs, clients that go away or are slow, the page."""

import contextlib
import http.client
import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ls_edge.runtime.fleet.local_cluster import LocalCluster
from tests.faults.cluster import FaultyCluster
from tests.faults.engines import Faults

from .serving import PLACEMENT, Server, picture, samples

TOKENS = ["first-token-of-sixteen", "second-token-of-sixteen"]


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens.txt"
    path.write_text("# of two clients\n" + "\n".join(TOKENS) + "\n\n")
    return path


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def status_of(server, method, path, headers, body=None):
    status, reply, _ = server.ask(method, path, b"" if body is None else body, headers)
    return status, reply


@pytest.fixture(scope="module")
def server(ls_edge_of_module, swarm, bundle):
    """A server that no test changes."""
    return Server(ls_edge_of_module, swarm.path, bundle)


def test_tokens(swarm, bundle, ls_edge, tokens):
    server = Server(ls_edge, swarm.path, bundle, "--token-file", tokens)
    for token in TOKENS:
        assert status_of(server, "GET", "/status", bearer(token))[0] == 200
        assert server.predict(picture(), headers={"Content-Type": "image/png", **bearer(token)})[0] == 200
    for headers in ({}, bearer(TOKENS[0][:-1]), bearer(TOKENS[0] + "x"), {"Authorization": TOKENS[0]},
                    {"Authorization": f"Basic {TOKENS[0]}"}, bearer(""), bearer("ä" * 16)):  # fmt: skip
        for method, path in (("GET", "/status"), ("GET", "/metrics"), ("GET", "/events"), ("POST", "/predict"),
                             ("POST", "/v2/models/tiny/infer"), ("GET", "/v2")):  # fmt: skip
            status, reply = status_of(server, method, path, {k: v.encode() for k, v in headers.items()})
            assert status == 401
            assert reply["WWW-Authenticate"] == "Bearer"
    for path in ("/health/live", "/health/ready", "/v2/health/live"):  # probes have no token
        assert status_of(server, "GET", path, {})[0] == 200
    # With a token, the name of the host does not matter: a proxy may pass on its own.
    assert status_of(server, "GET", "/status", {"Host": "example.com", **bearer(TOKENS[0])})[0] == 200


@pytest.mark.parametrize("content", ["", "# none\n", "short\n", "a token with spaces of some length\n", "ä" * 20])
def test_files_that_hold_no_tokens(swarm, bundle, command, tmp_path, content):
    path = tmp_path / "tokens.txt"
    path.write_text(content, encoding="utf-8")
    code, _, error = command("serve", "--peers", swarm.path, "--bundle", bundle, "--token-file", path)
    assert code == 2
    assert error.startswith(f"ls-edge: --token-file {path} ")
    assert error.count("\n") == 1


def test_hosts_and_pages_of_other_sites(server):
    port = server.address[1]
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", "localhost", f"[::1]:{port}"):
        assert status_of(server, "GET", "/status", {"Host": host})[0] == 200
    for host in ("example.com", f"example.com:{port}", "127.0.0.1.example.com", "[::1", "localhost@example.com"):
        assert status_of(server, "GET", "/status", {"Host": host})[0] in (400, 403)
    body = picture()
    for origin, status in ((f"http://127.0.0.1:{port}", 200), ("https://example.com", 403), ("null", 403)):
        assert status_of(server, "POST", "/predict", {"Content-Type": "image/png", "Origin": origin}, body)[0] == status


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=IP:127.0.0.1", "-out", cert, "-keyout", key],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return cert, key


def test_tls(swarm, bundle, ls_edge, certificate, tokens, command):
    cert, key = certificate
    given = ["serve", "--peers", swarm.path, "--bundle", bundle]
    server = ls_edge.start(*given, "--http", "0.0.0.0:0", "--tls-cert", cert, "--tls-key", key, "--token-file", tokens)
    port = next(
        int(found[1]) for line in server.stderr if (found := re.search(r"serving  url=https://\S+:(\d+) ", line))
    )
    context = ssl.create_default_context(cafile=cert)
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", "/status", headers=bearer(TOKENS[1]))
        reply = connection.getresponse()
        assert (reply.status, json.loads(reply.read())["model"]) == (200, "tiny")
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as plain:
        plain.request("GET", "/status")
        with pytest.raises((http.client.HTTPException, OSError)):
            plain.getresponse()
    server.terminate()
    assert server.wait(20) == 0
    for flags, words in (
        (["--tls-cert", cert], "belong together"),
        (["--tls-cert", cert, "--tls-key", cert], "cannot be used"),
        (["--tls-cert", tokens, "--tls-key", key], "cannot be used"),
        (["--http", "0.0.0.0:0", "--tls-cert", cert, "--tls-key", key], "needs --tls-cert, --tls-key and --token-file"),
    ):
        code, _, error = command(*given, *flags)
        assert code == 2
        assert words in error
        assert error.count("\n") == 1


def test_request_ids_traces_and_the_access_log(swarm, bundle, ls_edge):
    server = Server(ls_edge, swarm.path, bundle, "--access-log", "--log-json")
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    headers = {"Content-Type": "image/png", "X-Request-ID": "mine-1", "traceparent": trace}
    status, reply = status_of(server, "POST", "/predict", headers, picture())
    assert (status, reply["X-Request-ID"]) == (200, "mine-1")
    assert re.fullmatch(r"00-4bf92f3577b34da6a3ce929d0e0e4736-[0-9a-f]{16}-01", reply["traceparent"])
    assert reply["traceparent"] != trace
    status, reply = status_of(server, "GET", "/no", {"X-Request-ID": "two words", "traceparent": "00-0-0-0"})
    assert reply["X-Request-ID"] != "two words"
    assert reply["traceparent"] is None
    server.stop()
    lines = [json.loads(line) for line in server.process.stderr]
    first, second = (line for line in lines if line["event"] == "request")
    assert (first["id"], first["trace"], first["path"], first["status"]) == (
        "mine-1", "4bf92f3577b34da6a3ce929d0e0e4736", "/predict", 200,
    )  # fmt: skip
    assert first["ms"] > 0
    assert (second["path"], second["status"]) == ("/no", 404)


def test_a_client_that_goes_away_cancels_its_request(tmp_path, bundle, ls_edge, wait_until):
    local = FaultyCluster(tmp_path, bundle, {"a": [0, 1, 2, 3]})
    local.set_faults("a", Faults(least_ms=500))
    with local:
        local.wait_warm()
        server = Server(ls_edge, local.path, bundle, "--concurrency", 1)
        wait_until(lambda: server.get("/health/ready")[0] == 200)
        body = picture()
        with socket.create_connection(server.address, timeout=10) as connection:
            head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            wait_until(lambda: server.get("/status")[1]["in_flight"] == 1)
        wait_until(lambda: samples(server)["ls_edge_source_cancelled_requests_total",] == 1)
        wait_until(lambda: samples(server).get(("ls_edge_http_responses_total", "/predict", "499")) == 1)
        local.set_faults("a", Faults())
        wait_until(lambda: server.predict(body)[0] == 200)  # its place is free


def _is_closed(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_slow_clients_do_not_slow_others(server, wait_until):
    assert server.predict(picture())[0] == 200
    over = threading.Event()
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(server.address, timeout=10)) for _ in range(40)]

        def drip():
            head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n" + bytes(1000)
            for byte in head:
                for connection in slow[:20]:
                    with contextlib.suppress(OSError):
                        connection.sendall(bytes([byte]))
                if over.wait(0.02):
                    return

        for connection in slow[20:30]:  # these never read
            with contextlib.suppress(OSError):
                connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)
        thread = threading.Thread(target=drip)
        thread.start()
        try:
            with ThreadPoolExecutor(2) as pool:
                replies = list(pool.map(lambda seed: server.predict(picture(seed))[0], range(20)))
            assert replies == [200] * 20
            assert server.get("/health/live")[0] == 200
        finally:
            over.set()
            thread.join()
        # As many as there may be: further ones are closed, and those that are answered go on.
        more = [stack.enter_context(socket.create_connection(server.address, timeout=10)) for _ in range(80)]
        assert any(_is_closed(connection) for connection in more[40:])
    wait_until(lambda: server.get("/health/live")[0] == 200)


def test_files_are_read_again_without_losing_a_request(tmp_path, bundle, ls_edge, wait_until):
    with LocalCluster(tmp_path, bundle, PLACEMENT) as local:
        local.wait_warm()
        server = Server(ls_edge, local.path, bundle, "--concurrency", 4)
        wait_until(lambda: server.get("/health/ready")[0] == 200)
        assert set(server.get("/status")[1]["peers"]) == {"a", "b", "c"}
        over, statuses = threading.Event(), []

        def ask(seed):
            while not over.is_set():
                statuses.append(server.predict(picture(seed))[0])

        text = local.path.read_text()
        with_d = text.rstrip("\n") + "\n- name: d\n  address: tcp://127.0.0.1:9\n  blocks: [0]\n"
        threads = [threading.Thread(target=ask, args=[seed]) for seed in range(3)]
        for thread in threads:
            thread.start()
        try:
            for content, names in ((with_d, {"a", "b", "c", "d"}), (text, {"a", "b", "c"})):
                local.path.write_text(content)
                server.process.send_signal(signal.SIGHUP)
                wait_until(lambda names=names: set(server.get("/status")[1]["peers"]) == names)
            local.path.write_text("peers: 3\n")  # what cannot be used is left alone
            server.process.send_signal(signal.SIGHUP)
            wait_until(lambda: "not reloaded" in server.process.stderr.readline())
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert set(statuses) == {200}
        assert len(statuses) > 20
        assert server.predict(picture())[0] == 200
        assert server.stop() == 0


def test_the_page_and_its_events(swarm, bundle, ls_edge):
    server = Server(ls_edge, swarm.path, bundle)
    status, headers, body = server.ask("GET", "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    page = body.decode()
    nonce = re.search(r"script-src 'nonce-([\w-]+)'", headers["Content-Security-Policy"])[1]
    assert f'<script nonce="{nonce}">' in page
    assert "{{nonce}}" not in page
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
    with socket.create_connection(server.address, timeout=10) as connection:
        connection.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        stream = connection.makefile("rb")
        assert stream.readline() == b"HTTP/1.1 200 OK\r\n"

        def event():
            while not (line := stream.readline()).startswith(b"data: "):
                assert line
            return json.loads(line[6:])

        assert set(event()["status"]["peers"]) == set(PLACEMENT)
        answer = server.predict(picture())[1]
        end = time.monotonic() + 10
        while not (answers := event()["answers"]):
            assert time.monotonic() < end
        (shown,) = answers
        assert shown["label"] == answer["top"][0]["label"]
        assert [step for wave in shown["waves"] for track in wave for step in track] == answer["order"]
        assert server.stop() == 0  # an open page does not hold it up
        assert stream.read()[-5:] == b"0\r\n\r\n"


NAMES = (
    "Content-Length|Transfer-Encoding|Content-Type|Host|Expect|Connection|Authorization|Origin|Content-Encoding|"
    "Inference-Header-Content-Length|traceparent|X-Request-ID|Accept|Upgrade"
)
VALUES = (
    "chunked|gzip|-1|1|99999999999999999999|multipart/form-data|multipart/form-data; boundary=x|application/json|"
    "image/png|localhost|[::1|close|100-continue|null|http://[|Bearer x|websocket|*/*"
)
PATHS = (
    "/|/predict|/predict?top=2&logits=1|/predict?top=%00|/status|/events?x|/metrics|/v2|/v2/models/tiny/infer|"
    "/v2/models/tiny/versions/1|/v2/repository/index|/%2e%2e/|//|*"
)
DISPOSITIONS = ('form-data; name="file"; filename="a.png"', 'form-data; name="a"', "form-data", ";;;=", "\x00", "")
PART = st.tuples(
    st.sampled_from(["--x", "--x--", "--y", "--", ""]),
    st.sampled_from(DISPOSITIONS).map("Content-Disposition: {}".format),
    st.sampled_from([picture(), b"", b"text"]) | st.binary(max_size=40),
)
FORM = st.lists(PART, max_size=4).map(
    lambda parts: (
        b"".join(f"{line}\r\n{head}\r\n\r\n".encode() + body + b"\r\n" for line, head, body in parts) + b"--x--\r\n"
    )
)
VALUE = st.sampled_from(VALUES.split("|")).map(str.encode) | st.binary(max_size=30).map(
    lambda value: re.sub(rb"[\r\n]", b"", value)
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["GET", "POST", "HEAD", "PUT", "OPTIONS", "predict", "G\x00"]),
    st.sampled_from(PATHS.split("|")),
    st.lists(st.tuples(st.sampled_from(NAMES.split("|")), VALUE), max_size=3),
    FORM | st.sampled_from([picture(), b"{}", b""]) | st.binary(max_size=60),
    st.sampled_from(["whole", "whole", "short", "unframed"]),
)
def test_whatever_http_is_sent_nothing_fails(server, method, path, headers, body, framing):
    lines = [f"{method} {path} HTTP/1.1".encode(), *(name.encode() + b": " + value for name, value in headers)]
    names = {name for name, _ in headers}
    lines += [b"Host: localhost"] * ("Host" not in names)
    if framing == "whole" and not names & {"Content-Length", "Transfer-Encoding"}:
        lines.append(b"Content-Length: %d" % len(body))
    elif framing == "short":
        lines.append(b"Content-Length: %d" % (len(body) + 5))
    is_whole = lines[-1] == b"Content-Length: %d" % len(body)
    with socket.create_connection(server.address, timeout=30) as connection:
        connection.sendall(b"\r\n".join([*lines, b"", b""]) + body)
        if not is_whole:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)  # else the server waits for the rest
        reply = b""
        with contextlib.suppress(ConnectionError):
            reply = connection.recv(1 << 16)
    assert not is_whole or reply.startswith(b"HTTP/1.1 ")
    assert re.match(rb"HTTP/1.1 (?!500)[1-5]\d\d |$", reply), reply
    assert b"Traceback" not in reply


def test_and_it_is_as_well_as_before(server):
    assert server.predict(picture())[0] == 200
    seen = {key[2] for key in samples(server) if key[0] == "ls_edge_http_responses_total"}
    assert seen <= {"200", "400", "401", "403", "404", "405", "413", "415", "499"}
