"""``examples/monitoring`` and every metric, in a real Prometheus that scrapes a peer, a run, a server and a board."""

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest, start_http_server

from ls_edge.core.peers_file import load_peers
from ls_edge.device.sensors import Sensors
from ls_edge.runtime.fleet.local_cluster import LocalCluster, free_ports
from ls_edge.runtime.peer.counts import PeerSnapshot
from ls_edge.runtime.serve.metrics import PeerCollector, add_collectors
from ls_edge.runtime.serve.service import Service
from ls_edge.runtime.source.source import Source
from tests.runtime.serve.serving import Server, picture
from tests.runtime.serve.test_application import in_process

FOLDER = Path(__file__).parents[3] / "examples" / "monitoring"
PLACEMENT = {"a": [0, 1, 2, 3], "b": [1, 2, 3]}
METRICS = ("--metrics", "127.0.0.1:0")
BOARD = {
    "class/hwmon/hwmon1/name": "ina3221",
    "class/hwmon/hwmon1/in1_label": "VDD_IN",
    "class/hwmon/hwmon1/in1_input": "5000",
    "class/hwmon/hwmon1/curr1_input": "1400",
    "class/powercap/intel-rapl:0/name": "package-0",
    "class/powercap/intel-rapl:0/energy_uj": "9000000",
    "class/thermal/thermal_zone0/type": "cpu-thermal",
    "class/thermal/thermal_zone0/temp": "45500",
}
"""Files of a board's sensors, below ``/sys``."""


def tool(name):
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; Debian has it in the package prometheus")
    return found


def promtool(*arguments, **options):
    done = subprocess.run(
        [tool("promtool"), *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False, **options
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr


def expressions():
    """Every query of the dashboard."""
    panels = json.loads((FOLDER / "grafana" / "ls-edge.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def alerts():
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule["expr"] for rule in group["rules"]}


def fetch(url):
    with urllib.request.urlopen(url, timeout=10) as reply:
        return reply.read().decode()


@pytest.fixture
def board(tmp_path, bundle):
    """The metrics of a peer on a board with sensors."""
    for path, content in BOARD.items():
        file = tmp_path / "sys" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content + "\n")
    peers = tmp_path / "peers.yaml"
    peers.write_text("peers: [{name: orin, address: 'tcp://127.0.0.1:5555', blocks: [0]}]")
    collector = PeerCollector(lambda: load_peers(peers), lambda: PeerSnapshot("orin"))
    registry = CollectorRegistry(auto_describe=False)
    add_collectors(registry, collector, Sensors(tmp_path))
    server, thread = start_http_server(0, "127.0.0.1", registry)
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_files_are_in_order():
    promtool("check", "config", FOLDER / "prometheus.yml")
    promtool("check", "rules", FOLDER / "alerts.yml")


HTTP = r"^(ls_edge_http_\S+) (\S+)$"
HEALTHY, FULL, LATE, BROKEN = "healthy", "full", "late", "broken"


@pytest.mark.parametrize(
    ("course", "expected"),
    [
        ([HEALTHY] * 6, set()),
        ([FULL] * 6, {"LsEdgeServerRefuses"}),  # among probes and scrapes
        ([LATE] * 6, {"LsEdgeServerRefuses", "LsEdgeServerOverloaded"}),
        (["", "", LATE, "", "", ""], {"LsEdgeServerRefuses", "LsEdgeServerOverloaded"}),  # the first burst
        ([HEALTHY, HEALTHY, FULL, "", "", ""], {"LsEdgeServerRefuses"}),
        ([HEALTHY, BROKEN, BROKEN, BROKEN, BROKEN, BROKEN], {"LsEdgeServerRefuses"}),
    ],
)
def test_alerts_fire_in_a_course_of_minutes(write_peers, tiny_bundle, tmp_path, course, expected):
    """A real server answers what comes in a minute; the rules see its metrics as if the minutes had passed."""
    tool("promtool")
    series = {}
    source = Source.open(write_peers({"a": "0-5"}), tiny_bundle, max_inflight=1)
    service = Service(source, holder_wait_s=0.0, queue=0)
    with in_process(service) as status:

        def ask(*given):
            return status("POST", "/predict?budget_ms=1100", *given)

        def scrape(number):
            for name, value in re.findall(HTTP, generate_latest(service.registry).decode(), re.M):
                series.setdefault(name, ["_"] * number).append(value)

        scrape(0)
        for number, kind in enumerate(course, 1):
            for _ in range(20):
                assert status("GET", "/health/live") == 200
            if kind == HEALTHY:
                assert status("POST", "/predict", b"no image") == 400
            elif kind == BROKEN:
                service.decoders.decode = None
                assert status("POST", "/predict", picture()) == 500
            elif kind:
                service.places._free, service.places.queue = 0, 8 * (kind == LATE)  # all places are taken
                with ThreadPoolExecutor(3) as pool:
                    found = {one.result() for one in [pool.submit(ask, picture()) for _ in range(3)]}
                assert found == {503 if kind == FULL else 504}
                service.places._free = 1
            scrape(number)
    service.close()
    test = {
        "rule_files": [str(FOLDER / "alerts.yml")],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": with_instance(name), "values": " ".join(values)} for name, values in series.items()
                ],
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)',
                        "eval_time": f"{len(course)}m",
                        "exp_samples": [{"labels": "{}", "value": int(name in expected)}],
                    }
                    for name in ("LsEdgeServerRefuses", "LsEdgeServerOverloaded")
                ],
            }
        ],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    promtool("test", "rules", tmp_path / "test.yml")


STATES = {
    "LsEdgeProcessDown": ('up{job="ls-edge-peer"}', "1", "0"),
    "LsEdgeBlocksMissing": ("ls_edge_source_missing_blocks{}", "0", "2"),
    "LsEdgePeerNotWarm": ("ls_edge_peer_warm{}", "1", "0"),
    "LsEdgePeerUnreachable": ("ls_edge_neighbor_up{}", "1", "0"),
    "LsEdgeDeviceThrottled": ("ls_edge_device_throttled{}", "0", "1"),
}
"""Metric of each alert about a state, its value if all is well, and another one."""


@pytest.mark.parametrize("flaps", [True, False])
@pytest.mark.parametrize("alert", STATES)
def test_alerts_fire_for_states_that_flap_and_not_for_a_moment(tmp_path, alert, flaps):
    metric, well, bad = STATES[alert]
    values = f"{bad} {bad} {bad} {well} " * 20 if flaps else f"{bad} {bad} {bad} " + f"{well} " * 77
    expression = f'count(count_over_time(ALERTS{{alertname="{alert}",alertstate="firing"}}[400s])) or vector(0)'
    expected = {"expr": expression, "eval_time": "395s", "exp_samples": [{"labels": "{}", "value": int(flaps)}]}
    course = {"interval": "5s", "input_series": [{"series": metric, "values": values}], "promql_expr_test": [expected]}
    test = {"rule_files": [str(FOLDER / "alerts.yml")], "evaluation_interval": "5s", "tests": [course]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    promtool("test", "rules", tmp_path / "test.yml")


def with_instance(name):
    return f'{name[:-1]},instance="server"}}' if name.endswith("}") else f'{name}{{instance="server"}}'


def test_sensors_of_a_board(board):
    lines = fetch(board).splitlines()
    for line in (
        'ls_edge_device_power_watts{sensor="VDD_IN"} 7.0',
        'ls_edge_device_energy_joules_total{sensor="0 package-0"} 9.0',
        'ls_edge_device_temperature_celsius{sensor="cpu-thermal 0"} 45.5',
        "ls_edge_device_throttled 0.0",
    ):
        assert line in lines


class Prometheus:
    """Prometheus with the configuration of the example, at an interval for tests."""

    def __init__(self, folder, targets):
        config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
        assert {job["job_name"] for job in config["scrape_configs"]} == targets.keys()
        for job in config["scrape_configs"]:
            job["static_configs"] = [
                {"targets": [urllib.parse.urlsplit(url).netloc for url in targets[job["job_name"]]]}
            ]
        folder.mkdir()
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        shutil.copy(FOLDER / "alerts.yml", folder)
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}/api/v1"
        self.log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            [
                tool("prometheus"),
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
            ],
            stderr=self.log,
            stdout=self.log,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.log.close()

    def get(self, path, **query):
        """The data of an answer; None while Prometheus starts."""
        try:
            return json.loads(fetch(f"{self.url}/{path}?{urllib.parse.urlencode(query)}"))["data"]
        except (urllib.error.URLError, ConnectionError):
            assert self.process.poll() is None, self.log.read()
            return None

    def query(self, expression):
        return self.get("query", query=expression)["result"]


@pytest.mark.release
def test_each_query_and_each_alert_in_a_real_prometheus(tmp_path, bundle, ls_edge, board, wait_until):
    tool("prometheus")
    with LocalCluster(tmp_path / "peers", bundle, PLACEMENT, arguments=METRICS) as local:
        local.wait_warm()
        of_peers = {
            name: re.search(r"url=(http://\S+)/metrics", local.log_path(name).read_text())[1] for name in PLACEMENT
        }
        server = Server(ls_edge, local.path, bundle)
        run = ls_edge.start(
            "run",
            "--peers",
            local.path,
            "--bundle",
            bundle,
            "--data",
            "digits",
            "--rate",
            50,
            "--limit",
            10**6,
            *METRICS,
        )
        of_run = re.fullmatch(r"ls-edge: metrics at (http://\S+)/metrics\n", run.stderr.readline())[1]
        targets = {
            "ls-edge-peer": [*of_peers.values(), board],
            "ls-edge-run": [of_run],
            "ls-edge-serve": ["http://{}:{}".format(*server.address)],
        }
        for url in (of_peers["a"], of_run, *targets["ls-edge-serve"], board.removesuffix("/metrics")):
            promtool("check", "metrics", input=fetch(f"{url}/metrics"))
        with Prometheus(tmp_path / "prometheus", targets) as prometheus:

            def is_scraped():
                server.predict(picture())
                up = prometheus.get("query", query="min(sum_over_time(up[1m])) >= 3")
                return up is not None and up["result"]

            wait_until(is_scraped, 60)
            queries = [expression.replace("$__rate_interval", "20s") for expression in expressions()]
            assert len(queries) > 30
            assert [query for query in queries if not prometheus.query(query)] == []
            names = {name for name in prometheus.get("label/__name__/values") if name.startswith("ls_edge_")}
            for alert, expression in alerts().items():
                assert set(re.findall(r"ls_edge_\w+", expression)) <= names, alert
            used = set(re.findall(r"ls_edge_\w+", " ".join([*queries, *alerts().values()])))
            assert used <= names
            local.kill("a")
            wait_until(
                lambda: (
                    {"LsEdgeProcessDown", "LsEdgePeerUnreachable", "LsEdgeBlocksMissing"}
                    <= {one["labels"]["alertname"] for one in prometheus.get("alerts")["alerts"]}
                ),
                30,
            )
            rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
            assert {rule["name"]: rule["health"] for rule in rules} == dict.fromkeys(alerts(), "ok")
