"""Options that environment variables set: flags win over them, and they never contradict a flag."""

import json

import pytest

from ls_edge.runtime.fleet.local_cluster import LocalCluster


@pytest.fixture(scope="module")
def keyed_peers(tmp_path_factory, bundle):
    with LocalCluster(tmp_path_factory.mktemp("env"), bundle, {"a": range(4)}, keys=True, sources=["laptop"]) as local:
        local.wait_warm()
        yield local


@pytest.fixture
def environment(monkeypatch, keyed_peers, bundle):
    monkeypatch.setenv("LS_EDGE_PEERS", str(keyed_peers.path))
    monkeypatch.setenv("LS_EDGE_BUNDLE", str(bundle))
    monkeypatch.setenv("LS_EDGE_SECRET_KEY", str(keyed_peers.secret_key("laptop")))


@pytest.mark.usefixtures("environment")
def test_a_run_needs_no_flags_but_the_data(command, keyed_peers, bundle):
    code, out, errors = command("run", "--data", "digits", "--limit", 3, "--json")
    assert code == 0, errors
    settings = json.loads(out)["settings"]
    assert (settings["peers"], settings["bundle"]) == (str(keyed_peers.path), str(bundle))
    code, out, _ = command("status", "--json")
    assert (code, json.loads(out)["peers"]["a"]["key"]) == (0, "accepted")


@pytest.mark.usefixtures("environment")
def test_flags_win_over_variables(command, tmp_path):
    missing = tmp_path / "missing.yaml"
    code, _, errors = command("status", "--peers", missing)
    assert code == 2
    assert str(missing) in errors


@pytest.mark.usefixtures("environment")
def test_a_variable_never_contradicts_a_flag(command, tmp_path):
    code, _, errors = command("push", "--rollback", "--wait", 1)
    assert "give --bundle FOLDER" not in errors
    assert (code, "laptop' may not push" in errors) == (2, True)
    code, _, errors = command("peer", "--name", "nobody", "--store", tmp_path / "store")
    assert "nobody" in errors
    code, _, errors = command("profile", "bundle-that-is-missing", "--out", tmp_path / "p.json")
    assert "--peers is for --links" not in errors
    code, out, errors = command("doctor", "--json")
    assert "findings" in json.loads(out), errors


@pytest.mark.parametrize("name", ["run", "predict", "serve", "peer", "push", "status"])
def test_the_help_names_each_variable(command, name):
    code, out, _ = command(name, "--help")
    assert code == 0
    assert all(f"LS_EDGE_{variable}" in out for variable in ("PEERS", "BUNDLE", "SECRET_KEY"))
