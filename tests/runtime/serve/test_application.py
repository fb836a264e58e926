"""``ls-edge serve``: real HTTP over the loopback, real peers, and what it answers while they are killed."""

import base64
import contextlib
import gzip
import http.client
import json
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.data.decoder_process import LARGE_BYTES
from ls_edge.runtime.fleet.local_cluster import LocalCluster
from ls_edge.runtime.serve.access import Access
from ls_edge.runtime.serve.application import Api
from ls_edge.runtime.serve.bodies import Bodies
from ls_edge.runtime.serve.listener import open_listener
from ls_edge.runtime.serve.places import SLOW_AT_ONCE
from ls_edge.runtime.serve.server import HttpServer
from ls_edge.runtime.serve.service import Service
from ls_edge.runtime.source.source import Source
from tests.data.bombs import COSTLY, png, tiff_with_broken_tag
from tests.runtime.serve.serving import PLACEMENT, Server, expected, picture, samples, together, turned


@pytest.fixture(scope="module")
def shared(ls_edge_of_module, swarm, bundle):
    """A server that no test changes."""
    return Server(ls_edge_of_module, swarm.path, bundle, "--max-body", 100_000, "--concurrency", 2)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_image_gets_what_one_process_computes(shared, bundle, kind):
    image = picture(kind=kind)
    status, answer = shared.predict(image, "?logits=1&top=2", headers={"Content-Type": f"image/{kind.lower()}"})
    assert status == 200
    assert set(answer) == {"top", "degraded", "latency_ms", "order", "skipped", "why_skipped", "logits"}
    logits = expected(bundle, image)
    assert answer["logits"] == pytest.approx(logits.tolist(), abs=1e-4)
    probabilities = np.exp(logits) / np.exp(logits).sum()
    best = np.argsort(-probabilities)[:2]
    assert [one["label"] for one in answer["top"]] == [str(index) for index in best]
    assert [one["probability"] for one in answer["top"]] == pytest.approx(probabilities[best].tolist(), abs=1e-4)
    assert sorted(block for block, _ in answer["order"]) == [0, 1, 2, 3]
    assert {peer for _, peer in answer["order"]} <= PLACEMENT.keys()
    assert (answer["degraded"], answer["skipped"], answer["why_skipped"]) == (False, [], "")
    assert answer["latency_ms"] > 0
    _, plain = shared.predict(image)
    assert len(plain["top"]) == 3
    assert "logits" not in plain
    assert len(shared.predict(image, "?top=999&budget_ms=5000.5&logits=0")[1]["top"]) == 10


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("?top=0", "top '0': use a whole number from 1"),
        ("?top=-1", "top '-1': use"),
        ("?top=%D9%A3", "top '٣': use"),
        ("?top=", "top '': use"),
        ("?budget_ms=nan", "budget_ms 'nan': use milliseconds from 1 to 10000"),
        ("?budget_ms=0", "budget_ms '0': use"),
        ("?budget_ms=10001", "budget_ms '10001': use"),
        ("?budget_ms=1e3", "budget_ms '1e3': use"),
        ("?logits=yes", "logits 'yes': use 0 or 1"),
        ("?Top=1", "unknown parameter 'Top'; use top, budget_ms or logits"),
        ("?top=1&budget_ms=9&top=1", "a parameter is given twice; give each once"),
        ("?x=" + "y" * 5000, "unknown parameter 'x'"),
        ("?" + "&".join(f"a{n}=1" for n in range(50)), "unknown parameter 'a0'"),
        ("?top=%1b%5b31m", r"top '\\x1b[31m': use"),
    ],
)
def test_parameters_that_cannot_be_used_are_refused(shared, query, message):
    status, answer = shared.predict(picture(), query)
    assert status == 400
    assert message in answer["error"]


def test_bodies_that_are_not_an_image_are_refused(shared):
    assert shared.predict(b"no image") == (
        400,
        {"error": "cannot decode the body: its format is not supported; replace or remove it"},
    )
    assert shared.predict(picture()[:200])[0] == 400
    assert shared.predict(b"") == (400, {"error": "the body is empty; send an encoded image, such as a JPEG"})
    for kind in ("text/plain", "application/json", "<script>"):
        status, answer = shared.predict(picture(), headers={"Content-Type": kind})
        assert status == 415
        assert "send the encoded image as the body" in answer["error"]


def b64(content):
    return base64.b64encode(content).decode()


@pytest.mark.parametrize(("kind", "orientation"), [("JPEG", 1), ("JPEG", 6), ("PNG", 9), ("WEBP", 8), ("TIFF", 6)])
def test_answer_says_that_a_rotation_was_not_applied(shared, kind, orientation):
    photo = turned(orientation, kind)
    note = "image 0 has an EXIF orientation that this model ignores; turn it upright for a better answer"
    expected_notes = [note] if 2 <= orientation <= 8 and kind != "TIFF" else None  # Pillow always turns it
    status, answer = shared.predict(photo)
    assert (status, answer.get("notes")) == (
        200,
        expected_notes and [note.replace("image 0", "the image")],
    )
    document = {"inputs": [{"name": "image", "shape": [2], "datatype": "BYTES", "data": [b64(photo), b64(picture())]}]}
    status, _, body = shared.ask("POST", "/v2/models/tiny/infer", json.dumps(document).encode(), {})
    assert status == 200
    assert json.loads(json.loads(body)["parameters"].get("notes", "null")) == expected_notes


def memory_of(process):
    """Memory of a process and those that it started, in MiB."""
    found, children = 0, [process]
    while children:
        one = children.pop()
        with contextlib.suppress(OSError):
            children += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
            found += int(re.search(r"Pss:\s+(\d+)", Path(f"/proc/{one}/smaps_rollup").read_text())[1])
    return found >> 10


@pytest.mark.release
@pytest.mark.parametrize("path", ["/predict", "/v2/models/tiny/infer"])
def test_costly_requests_of_four_clients_take_little_memory(swarm, bundle, ls_edge, path):
    server = Server(ls_edge, swarm.path, bundle, "--budget-ms", 60_000)
    server.predict(picture())
    before, over, most = memory_of(server.process.pid), threading.Event(), []
    made = (make() for make in list(COSTLY.values())[::2]) if path == "/predict" else costly_documents()
    kind = {"Content-Type": "image/x" if path == "/predict" else "application/json", "Content-Encoding": "gzip"}

    def watch():
        while not over.wait(0.05):
            most.append(memory_of(server.process.pid))

    def ask(body):
        return server.ask("POST", path, body, kind, timeout=90)[0]

    def ask_all():
        try:
            with ThreadPoolExecutor(4) as clients:
                for body in made:
                    assert set(clients.map(ask, [gzip.compress(body, 1)] * 4)) <= {200, 400, 413}
        finally:
            over.set()

    together(ask_all, watch)
    assert max(most) - before < 500
    assert server.predict(picture())[0] == 200


def costly_documents():
    """Documents of 15 MiB, of which a tree of objects would take gigabytes."""
    tensor = b'{"inputs": [{"name": "%s", "shape": [%s], "datatype": "%s", "data": [%s]}]}'
    for data in (b'["a"]', b"[]", b"NaN", b"[[]]", b'""', b"0", b"{}", b"[[[[1]]]]", b"null"):
        many = b",".join([data] * ((15 << 20) // (len(data) + 1)))
        yield tensor % (b"image", b"256", b"BYTES", many)
        yield tensor % (b"input", b"1, 3, 16, 16", b"FP32", many)
    yield b'{"inputs": [%s]}' % b",".join([b'{"name": "a", "shape": [1], "datatype": "b"}'] * 300_000)
    yield b'{"inputs": [{"name": "a", "shape": [%s], "datatype": "b"}]}' % b",".join([b"1000"] * 3_000_000)
    yield b'{"outputs": [%s]}' % b",".join([b'{"name": "label"}'] * 800_000)
    yield b'{"id": "%s"}' % (b"\\u00e9" * 2_000_000)


def test_damaged_images_do_not_fill_the_log(swarm, bundle, ls_edge):
    server = Server(ls_edge, swarm.path, bundle)
    for number in range(30):
        assert server.predict(tiff_with_broken_tag(number))[0] == 200
    assert server.stop() == 0
    assert len(server.process.stderr.readlines()) == 1  # "stopping"


@contextlib.contextmanager
def in_process(service):
    """A server in this process; yields a function that asks it."""
    application = Api(service, Access(loopback_only=True), Bodies(10_000_000)).application
    with HttpServer(open_listener("127.0.0.1:0", "--http"), application) as server:

        def status(method, path, body=None):
            connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
            with contextlib.closing(connection):
                connection.request(method, path, body)
                return connection.getresponse().status

        yield status


def test_source_that_has_ended_is_unavailable(swarm, bundle):
    with Source.open(swarm.path, bundle) as source:
        service = Service(source, holder_wait_s=0.0, queue=0)
    with in_process(service) as status:
        for asked in (("GET", "/health/live"), ("GET", "/health/ready"), ("POST", "/predict", picture())):
            assert status(*asked) == 503
    service.close()


def test_an_image_that_takes_long_leaves_its_place_to_others(swarm, bundle):
    small, large = picture(), png(4096, 4096, 8, 2)
    source = Source.open(swarm.path, bundle, max_inflight=1, budget_ms=20_000)
    service = Service(source, holder_wait_s=5.0, queue=0)
    with in_process(service) as status, ThreadPoolExecutor(1) as pool:
        assert status("POST", "/predict", small) == 200
        service.decoders._reserve(LARGE_BYTES)  # large images are being decoded, without end
        waiting = pool.submit(status, "POST", "/predict", large)
        while service.places._slow_free == SLOW_AT_ONCE:
            time.sleep(0.001)
        assert status("POST", "/predict", small) == 200
        assert status("POST", "/predict?budget_ms=300", large) == 504
        service.decoders._reserve(-LARGE_BYTES)
        assert waiting.result(60) == 200
        assert (service.places._free, service.places._slow_free) == (1, SLOW_AT_ONCE)
    service.close()


def test_malformed_http_is_refused(shared):
    post = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: image/png\r\n"
    image, chunk = picture(), b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
    for request, status in (
        (post + b"Content-Length: x\r\n\r\n", 400),
        (post + b"X: " + b"y" * (1 << 20) + b"\r\n\r\n", 400),
        (post + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n", 400),
        (b"<script>alert(1)</script>\r\n\r\n", 400),
        (post + b"Content-Length: 100001\r\n\r\n", 413),
        (post + b"Content-Length: 30000000\r\n\r\n" + bytes(30_000_000), 413),
        (post + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 64, 413),
        (post + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(image), image), 200),
    ):
        reply = shared.raw(request)
        assert int(reply.split()[1]) == status, request[:200]
        assert b"Traceback" not in reply
    assert shared.get("/health/live")[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [("GET", "/predict", "POST"), ("OPTIONS", "/predict", "POST"), ("POST", "/status", "GET, HEAD"),
     ("DELETE", "/", "GET, HEAD")],
)  # fmt: skip
def test_other_methods_are_refused(shared, method, path, allow):
    status, headers, body = shared.ask(method, path)
    assert (status, headers["Allow"]) == (405, allow)
    assert json.loads(body) == {"error": f"the method is not allowed here; use {allow}"}


def test_health_and_status_show_the_peers(shared, bundle, wait_until):
    wait_until(lambda: shared.get("/health/ready")[0] == 200)
    assert shared.get("/health/ready") == (200, {"ready": True, "missing_blocks": []})
    assert shared.get("/health/live") == (200, {"live": True})
    for path in ("/", "/health/live", "/health/ready", "/status", "/metrics", "/v2", "/v2/models/tiny/ready"):
        status, headers, body = shared.ask("HEAD", path)
        assert (status, body) == (200, b"")
        assert int(headers["Content-Length"]) > 0
    manifest = Bundle.open(bundle).manifest
    status, found = shared.get("/status")
    assert status == 200
    assert {key: found[key] for key in ("bundle_id", "model", "classes", "policy", "in_flight", "ready")} == {
        "bundle_id": manifest.bundle_id, "model": "tiny", "classes": 10, "policy": "nearest", "in_flight": 0,
        "ready": True,
    }  # fmt: skip
    assert {name: peer["blocks"] for name, peer in found["peers"].items()} == PLACEMENT
    for peer in found["peers"].values():
        assert (peer["state"], peer["warm"], peer["bundle_id"], peer["reason"]) == (
            "alive",
            True,
            manifest.bundle_id,
            None,
        )


def test_metrics_count_answers_and_responses(shared):
    before = samples(shared)
    assert shared.predict(picture())[0] == 200
    assert shared.predict(b"no image")[0] == 400
    shared.get("/no/such/path?x=<b>")
    after = samples(shared)
    grown = {
        key[0] if key[0] != "ls_edge_http_responses_total" else key: after[key] - before.get(key, 0) for key in after
    }
    assert grown["ls_edge_source_answers_total"] == grown["ls_edge_source_latency_seconds_count"] == 1
    assert grown["ls_edge_http_responses_total", "/predict", "200"] == 1
    assert grown["ls_edge_http_responses_total", "/predict", "400"] == 1
    assert grown["ls_edge_http_responses_total", "other", "404"] == 1
    paths = {key[1] for key in after if key[0] == "ls_edge_http_responses_total"}
    assert {"/predict", "other"} <= paths
    assert not [path for path in paths if "no/such" in path]
    assert after["ls_edge_http_request_seconds_count", "/predict"] >= 2


@pytest.mark.parametrize("slow", [250], indirect=True)  # so that three requests meet on a busy machine
def test_requests_beyond_concurrency_and_queue_or_budget_are_refused(slow, bundle, ls_edge, wait_until):
    server = Server(ls_edge, slow.path, bundle, "--concurrency", 1, "--queue", 1, "--budget-ms", 5000, "--max-skips", 0)
    wait_until(lambda: server.get("/health/ready")[0] == 200)

    def later():
        wait_until(lambda: server.get("/status")[1]["in_flight"] == 1)
        return together(lambda: server.predict(picture()), latest)

    def latest():
        wait_until(lambda: server.get("/status")[1]["waiting"] == 1)
        return server.predict(picture()), server.get("/health/live")[0]

    first, (second, (refused, live)) = together(lambda: server.predict(picture()), later)
    assert first[0] == second[0] == 200
    assert refused == (503, {"error": "the limit of images is reached (1 being answered, 1 waiting); try again"})
    assert live == 200
    assert server.get("/status")[1]["waited_ms"] > 0
    status, answer = server.predict(picture(), "?budget_ms=100")
    assert status == 504
    assert answer["error"].startswith("request ")
    assert server.predict(picture())[0] == 200  # the place is free again


def test_blocks_without_holder_are_skipped_or_awaited(tmp_path, bundle, ls_edge, wait_until):
    with LocalCluster(tmp_path, bundle, {"a": [0, 1], "b": [2, 3]}) as local:
        local.wait_warm()
        local.kill("a")
        local.kill("b")
        server = Server(ls_edge, local.path, bundle, "--wait", "0.1", "--max-skips", 2)
        assert server.get("/health/live")[0] == 200
        assert server.get("/health/ready") == (503, {"ready": False, "missing_blocks": [0, 1, 2, 3]})
        assert server.predict(picture()) == (503, {"error": "no reachable peer serves blocks 0-3; try again"})
        found = server.get("/status")[1]
        assert (found["ready"], found["peers"]["a"]["state"], found["peers"]["a"]["warm"]) == (False, "lost", False)
        local.start("a")
        wait_until(lambda: server.get("/health/ready")[0] == 200, 60.0)
        status, answer = server.predict(picture())
        assert (status, answer["degraded"], answer["skipped"]) == (200, True, [2, 3])
        assert answer["order"] == [[0, "a"], [1, "a"]]


@pytest.mark.release
def test_every_image_gets_one_answer_while_peers_are_killed(tmp_path, bundle, ls_edge, wait_until):
    budget_s, clients = 4.0, 3
    with LocalCluster(tmp_path, bundle, PLACEMENT) as local:
        local.wait_warm()
        server = Server(ls_edge, local.path, bundle, "--budget-ms", budget_s * 1e3, "--concurrency", clients)
        wait_until(lambda: server.get("/health/ready")[0] == 200)
        over, outcomes = threading.Event(), []

        def ask(seed):
            while not over.is_set():
                began = time.monotonic()
                status, answer = server.predict(picture(seed))
                outcomes.append((status, answer, time.monotonic() - began))

        def kill():
            rng = random.Random(0)
            for name in rng.choices(list(PLACEMENT), k=5):
                time.sleep(rng.uniform(0.1, 0.3))
                local.kill(name)
                time.sleep(rng.uniform(0.0, 0.2))
                local.start(name)
                local.wait_warm(name)
            over.set()

        try:
            together(kill, *(lambda seed=seed: ask(seed) for seed in range(clients)))
        finally:
            over.set()
        statuses = [status for status, _, _ in outcomes]
        assert set(statuses) <= {200, 504}  # each block has a second holder
        assert statuses.count(200) > 0.9 * len(statuses) > 10
        assert max(seconds for _, _, seconds in outcomes) < budget_s + 2
        counted = samples(server)
        assert counted["ls_edge_source_requests_submitted_total",] == len(outcomes)
        assert counted["ls_edge_source_answers_total",] == statuses.count(200)
        assert server.stop() == 0
