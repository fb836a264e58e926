"""TLS, and files that are read again while requests are answered."""

import contextlib
import http.client
import json
import re
import signal
import ssl
import threading

import pytest

from ls_edge.runtime.fleet.local_cluster import LocalCluster
from tests.runtime.serve.serving import PLACEMENT, TOKENS, Server, bearer, picture

COUNTS = (
    "ls_edge_source_requests_submitted_total",
    "ls_edge_source_answers_total",
    "ls_edge_source_latency_seconds_count",
    "ls_edge_http_responses_total",
)


def test_https_needs_a_certificate_and_tokens(swarm, bundle, ls_edge, certificate, tokens, command):
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


def test_certificate_and_tokens_are_read_again(tmp_path, swarm, bundle, ls_edge, make_certificate, tokens):
    files = make_certificate(tmp_path)
    server = ls_edge.start(
        *("serve", "--peers", swarm.path, "--bundle", bundle, "--http", "127.0.0.1:0"),
        *("--tls-cert", files[0], "--tls-key", files[1], "--token-file", tokens),
    )
    port = next(
        int(found[1]) for line in server.stderr if (found := re.search(r"serving  url=https://\S+:(\d+) ", line))
    )
    context = ssl._create_unverified_context()

    def connect():
        return contextlib.closing(http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=30))

    def ask(connection, token, path="/status", body=None):
        connection.request("GET" if body is None else "POST", path, body, bearer(token))
        reply = connection.getresponse()
        return reply.status, reply.read()

    def read_again():
        """What the log says of each of the files."""
        server.send_signal(signal.SIGHUP)
        lines = []
        while len(lines) < 3:
            line = server.stderr.readline()
            assert line
            lines += [line] if "reloaded" in line else []
        return lines

    def answered():
        with connect() as connection:
            text = ask(connection, TOKENS[1], "/metrics")[1].decode()
        return [re.search(rf"^{name}(?:{{.*path=./predict.*}})? (\S+)", text, re.M)[1] for name in COUNTS]

    first = ssl.get_server_certificate(("127.0.0.1", port))
    assert first == files[0].read_text()
    with connect() as kept, connect() as page:
        page.request("GET", "/events", headers=bearer(TOKENS[0]))
        events = page.getresponse()
        assert events.status == 200
        assert ask(kept, TOKENS[0], "/predict", picture())[0] == 200
        assert answered() == ["1.0", "1.0", "1.0", "1.0"]

        make_certificate(tmp_path)
        tokens.write_text(TOKENS[1])
        lines = read_again()
        assert not any("not reloaded" in line for line in lines)
        for path in (*files, tokens, swarm.path):
            assert any(str(path) in line for line in lines)
        assert events.read().startswith(b"data: ")  # to its end: the token is no longer known
        second = ssl.get_server_certificate(("127.0.0.1", port))
        assert second == files[0].read_text() != first
        with connect() as new:
            assert [ask(one, token)[0] for one in (kept, new) for token in TOKENS] == [401, 200, 401, 200]
        assert answered() == ["1.0", "1.0", "1.0", "1.0"]

        files[0].write_text("no certificate")
        tokens.write_text("short")
        lines = read_again()
        assert [str(path) in line for line in lines if "not reloaded" in line for path in (files[0], tokens)].count(
            True
        ) == 2
        assert ssl.get_server_certificate(("127.0.0.1", port)) == second
        with connect() as new:
            assert [ask(one, token)[0] for one in (kept, new) for token in TOKENS] == [401, 200, 401, 200]
    server.terminate()
    assert server.wait(20) == 0


def test_peers_are_read_again_without_losing_a_request(tmp_path, bundle, ls_edge, wait_until):
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
            local.path.write_text("peers: 3\n")  # which cannot be used
            server.process.send_signal(signal.SIGHUP)
            wait_until(lambda: "not reloaded" in server.process.stderr.readline())
            assert server.get("/status")[1]["ready"]
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert set(statuses) == {200}
        assert server.predict(picture())[0] == 200
        assert server.stop() == 0
