"""Rules for every request: ids, clients that go away, and requests that mean no good."""

import contextlib
import re
import socket

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.faults.cluster import FaultyCluster
from tests.faults.engines import Faults
from tests.runtime.serve.serving import Server, picture, samples, status_of


@pytest.fixture(scope="module")
def server(ls_edge_of_module, swarm, bundle):
    """A server that no test changes."""
    return Server(ls_edge_of_module, swarm.path, bundle)


def test_responses_carry_ids(server):
    headers = {"Content-Type": "image/png", "X-Request-ID": "mine-1"}
    status, reply = status_of(server, "POST", "/predict", headers, picture())
    assert (status, reply["X-Request-ID"]) == (200, "mine-1")
    status, reply = status_of(server, "GET", "/no", {"X-Request-ID": "two words"})
    assert reply["X-Request-ID"] != "two words"


def test_client_that_goes_away_cancels_its_image(tmp_path, bundle, ls_edge, wait_until):
    local = FaultyCluster(tmp_path, bundle, {"a": [0, 1, 2, 3]})
    local.set_faults("a", Faults(least_ms=500))
    with local:
        local.wait_warm()
        server = Server(ls_edge, local.path, bundle, "--concurrency", 1)
        wait_until(lambda: server.get("/health/ready")[0] == 200)
        body, gone = picture(), ("ls_edge_http_responses_total", "/predict", "499")
        assert samples(server)[gone] == 0  # otherwise its first increase is not seen
        with socket.create_connection(server.address, timeout=10) as connection:
            head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            wait_until(lambda: server.get("/status")[1]["in_flight"] == 1)
        wait_until(lambda: samples(server)["ls_edge_source_canceled_requests_total",] == 1)
        wait_until(lambda: samples(server)[gone] == 1)
        local.set_faults("a", Faults())
        wait_until(lambda: server.predict(body)[0] == 200)  # its place is free


NAMES = (
    "Content-Length|Transfer-Encoding|Content-Type|Host|Expect|Connection|Authorization|Origin|Content-Encoding|"
    "Inference-Header-Content-Length|X-Request-ID|Accept|Upgrade"
)
VALUES = (
    "chunked|gzip|-1|1|99999999999999999999|multipart/form-data|multipart/form-data; boundary=x|application/json|"
    "image/png|localhost|[::1|close|100-continue|null|http://[|Bearer x|websocket|*/*"
)
PATHS = (
    "/|/predict|/predict?top=2&logits=1|/predict?top=%00|/status|/events?x|/metrics|/v2|/v2/models/tiny/infer|"
    "/v2/models/tiny/versions/1|/%2e%2e/|//|*"
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
    assume(all(name != "Expect" or value.isascii() for name, value in headers))  # aiohttp answers 500 to others
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
    assert not is_whole or reply.startswith(b"HTTP/1.")
    assert re.match(rb"HTTP/1.[01] (?!500)[1-5]\d\d |$", reply), reply
    assert b"Traceback" not in reply


def test_server_is_as_well_as_before(server):
    assert server.predict(picture())[0] == 200
    seen = {key[2] for key, count in samples(server).items() if key[0] == "ls_edge_http_responses_total" and count}
    assert seen <= {"200", "400", "403", "404", "405", "413", "415", "417", "499"}
