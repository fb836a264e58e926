"""``examples/deploy``: each file passes its linter and starts peers with existing flags."""

import glob
import json
import os
import re
import shlex
import sys
from pathlib import Path

import click
import jinja2
import pytest
import yaml

from ls_edge.cli.main import cli
from ls_edge.engines.tensorrt.cache import default_folder
from tests.linters import lint

FOLDER = Path(__file__).parents[2] / "examples" / "deploy"
UNIT, SERVE_UNIT = "ls-edge-peer@.service", "ls-edge-serve@.service"
COMPOSE = ("compose.yaml", "compose.jetson.yaml")
IMAGES = ("Dockerfile", "Dockerfile.jetson")


def parse(words, name="peer"):
    """Read a command line as the command does; raises for flags that it lacks."""
    assert words[0] == name
    parent = click.Context(cli, info_name="ls-edge", help_option_names=["-h", "--help"])
    command = cli.get_command(parent, name)
    typed = [re.sub(r"%i|\$\(NODE\)|\$\{NAME(:\?)?\}", "orin-0", one) for one in words[1:]]
    found = command.make_context(name, typed, parent=parent)
    return found.params


def unit_command(unit=UNIT):
    line = re.search(r"^ExecStart=(.*)$", (FOLDER / unit).read_text(), re.M)[1]
    program, *words = shlex.split(line)
    assert program.endswith("/ls-edge")
    return words


def container(name):
    document = yaml.safe_load((FOLDER / name).read_text())
    if name == "compose.yaml":
        return document["services"]["peer"]["command"]
    return document["spec"]["template"]["spec"]["containers"][0]["args"]


@pytest.mark.parametrize("where", [UNIT, "compose.yaml", "daemonset.yaml"])
def test_peers_are_started_with_a_store_and_their_key(where):
    params = parse(unit_command() if where == UNIT else container(where))
    assert (params["name"], params["bundle"]) == ("orin-0", None)
    assert params["secret_key"].name == "orin-0.key_secret"
    assert params["store"] == Path("/var/lib/ls-edge/store")


def test_the_unit_of_a_server_serves_with_the_key_of_its_source():
    params = parse(unit_command(SERVE_UNIT), "serve")
    assert params["secret_key"] == Path("/etc/ls-edge/orin-0.key_secret")
    assert (params["http"], params["insecure_http"]) == ("127.0.0.1:8080", False)


def writable_in_unit(text):
    """Folders that systemd makes for the user of a service; everything else is read-only."""
    assert "ProtectSystem=strict" in text
    assert "User=edge" in text
    made = {"StateDirectory": "/var/lib", "CacheDirectory": "/var/cache"}
    return [Path(top, re.search(rf"^{key}=(.+)$", text, re.M)[1]) for key, top in made.items()]


def environment_of_unit(text):
    return dict(line.split("=", 1) for line in re.findall(r"^Environment=(.*)$", text, re.M))


def image(name):
    """Variables of an image, and the folders in it that belong to its user and are volumes."""
    text = (FOLDER / name).read_text()
    assert "--uid 10001" in text
    assert "USER 10001" in text
    owned = re.search(r"install -d -o edge (.+)$", text, re.M)[1].split()
    assert json.loads(re.search(r"^VOLUME (.*)$", text, re.M)[1]) == owned
    return dict(line.split("=", 1) for line in re.findall(r"^ENV (.*)$", text, re.M)), list(map(Path, owned))


def writable_in_compose():
    """Volumes that are not read-only; a new one has the owner of the image's folder."""
    document = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    mounts = [one.split(":") for one in document["services"]["peer"]["volumes"]]
    named = [Path(inside) for volume, inside, *mode in mounts if volume in document["volumes"] and mode != ["ro"]]
    assert set(named) <= set(image("Dockerfile")[1])
    return named


def writable_in_kubernetes():
    """Mounts that last on the node and are given to the user first: Kubernetes makes them as root."""
    spec = yaml.safe_load((FOLDER / "daemonset.yaml").read_text())["spec"]["template"]["spec"]
    (first,), (peer,) = spec["initContainers"], spec["containers"]
    assert first["command"][:2] == ["chown", str(peer["securityContext"]["runAsUser"])]
    hosts = {one["name"] for one in spec["volumes"] if one.get("hostPath", {}).get("type") == "DirectoryOrCreate"}
    both = [one for one in first["volumeMounts"] if one in peer["volumeMounts"] and one["name"] in hosts]
    return [Path(one["mountPath"]) for one in both if one["mountPath"] in first["command"]]


@pytest.mark.parametrize("where", [UNIT, SERVE_UNIT, *IMAGES, "compose.yaml", "daemonset.yaml"])
def test_paths_that_the_program_writes_are_writable_and_persistent(where, monkeypatch):
    text = (FOLDER / where).read_text()
    if where.endswith(".service"):
        variables, writable = environment_of_unit(text), writable_in_unit(text)
    else:
        variables, writable = image(where if where in IMAGES else "Dockerfile")
    if where == "compose.yaml":
        writable = writable_in_compose()
    elif where == "daemonset.yaml":
        writable = writable_in_kubernetes()
    monkeypatch.delenv("LS_EDGE_CACHE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    written = [default_folder()]
    if where in (UNIT, "compose.yaml", "daemonset.yaml"):
        written.append(parse(unit_command() if where == UNIT else container(where))["store"])
    for path in written:
        assert any(folder in path.parents for folder in writable), path


@pytest.mark.parametrize("name", [UNIT, SERVE_UNIT])
def test_systemd_accepts_the_unit(tmp_path, name):
    text = (FOLDER / name).read_text().replace("/opt/ls-edge/bin/ls-edge", sys.executable)
    unit = tmp_path / name.replace("@", "@orin-0")
    unit.write_text(text)
    done = lint("systemd-analyze", "verify", "--man=no", unit)
    # Warnings do not change its exit code; systemd before 254 lacks these two keys and ignores them.
    warnings = [line for line in done.stderr.splitlines() if not re.search("'Restart(Steps|MaxDelaySec)'", line)]
    assert unit.name not in "".join(warnings), done.stderr
    assert re.search("^After=.* nvpmodel.service$", text, re.M)
    assert "StartLimitIntervalSec=0" in text.partition("[Service]")[0]  # otherwise five quick failures end it for good


@pytest.mark.parametrize("name", IMAGES)
def test_dockerfiles_pass_their_linter(name):
    lint("hadolint", FOLDER / name)


@pytest.mark.parametrize("name", COMPOSE)
def test_compose_files_follow_the_specification(name):
    lint("check-jsonschema", "--builtin-schema", "vendor.compose-spec", FOLDER / name)


def test_a_container_on_a_jetson_has_its_gpu_and_the_files_that_tell_board_and_mode():
    peer = yaml.safe_load((FOLDER / "compose.jetson.yaml").read_text())["services"]["peer"]
    assert (peer["runtime"], "deploy" in peer) == ("nvidia", False)
    mounts = dict(one.removesuffix(":ro").split(":") for one in peer["volumes"])
    assert set(mounts) == {
        "/etc/nv_tegra_release",
        "/etc/nvpmodel.conf",
        "/var/lib/nvpmodel",
        "/proc/device-tree/model",
    }
    assert mounts["/proc/device-tree/model"] == "/tmp/nv_jetson_model"
    text = (FOLDER / "Dockerfile.jetson").read_text()
    assert_extras(re.search("^ARG EXTRAS=(.*)$", text, re.M)[1])
    assert_extras(re.search("--build-arg EXTRAS=([a-z0-9,]+)", text)[1])


def test_the_manifest_is_valid_for_kubernetes_and_needs_no_gpu():
    container_ = yaml.safe_load((FOLDER / "daemonset.yaml").read_text())["spec"]["template"]["spec"]
    assert container_["hostNetwork"] is True
    assert all("resources" not in one for one in container_["containers"])
    lint("kubernetes-validate", FOLDER / "daemonset.yaml")


def assert_extras(names):
    project = (FOLDER.parents[1] / "pyproject.toml").read_text()
    assert all(re.search(rf"^{name} = ", project, re.M) for name in names.split(","))


@pytest.mark.parametrize(
    ("is_jetson", "release", "extras"),
    [(False, "24.04", "cpu,metrics"), (True, "22.04", "jetson6,metrics"), (True, "24.04", "metrics")],
)
def test_the_playbook_gives_each_board_its_environment(is_jetson, release, extras, tmp_path):
    for name in ("ls_edge-0.1.0-py3-none-any.whl", "ls_edge-0.2.0-py3-none-any.whl"):
        (tmp_path / name).touch()
    (play,) = yaml.safe_load((FOLDER / "playbook.yml").read_text())
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    environment.filters["basename"] = os.path.basename
    found = {
        "tegra": {"stat": {"exists": is_jetson}}, "ansible_facts": {"distribution_version": release},
        "playbook_dir": str(tmp_path), "query": lambda _, pattern: glob.glob(pattern),
    }  # fmt: skip

    def render(text):
        return environment.from_string(text).render(found)

    found |= {name: render(text) for name, text in play["vars"].items()}
    tasks = {next(key for key in task if key.startswith("ansible.")): task for task in play["tasks"]}
    packages, wheel = (task["ansible.builtin.pip"] for task in play["tasks"] if "ansible.builtin.pip" in task)
    assert (
        render(packages["name"])
        == f"{render(wheel['name'])}[{extras}]"
        == f"/opt/ls_edge-0.2.0-py3-none-any.whl[{extras}]"
    )
    assert render(packages["virtualenv_site_packages"]) == str(is_jetson)  # JetPack's TensorRT is the system's
    assert tasks["ansible.builtin.user"]["ansible.builtin.user"]["groups"] == tasks["ansible.builtin.group"]["loop"]
    assert set(tasks["ansible.builtin.group"]["loop"]) == {"video", "render"}
    assert_extras(extras)


def test_the_playbook_is_short_and_names_existing_files(tmp_path):
    text = (FOLDER / "playbook.yml").read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith(("#", "---"))]
    assert len(lines) <= 40
    assert UNIT in text
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path)}
    lint("ansible-lint", "--offline", FOLDER / "playbook.yml", cwd=tmp_path, env=environment)


@pytest.mark.parametrize("name", [*COMPOSE, "daemonset.yaml", "playbook.yml"])
def test_yaml_files_pass_their_linter(name):
    rules = "{line-length: {max: 160}, document-start: disable}"
    lint("yamllint", "-s", "-d", f"{{extends: default, rules: {rules}}}", FOLDER / name)


def test_the_table_of_the_folder_is_complete():
    text = (FOLDER / "README.md").read_text()
    assert set(re.findall(r"^\| `([^`]+)`", text, re.M)) == {one.name for one in FOLDER.iterdir()} - {"README.md"}
