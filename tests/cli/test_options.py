"""Options that many commands share: environment variables, output files and ``--provider``."""

import json
from pathlib import Path

import click
import pytest

from ls_edge.cli.main import COMMANDS, cli
from ls_edge.core.errors import UsageError
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


@pytest.mark.release
@pytest.mark.usefixtures("environment")
def test_a_variable_never_contradicts_a_flag(command, tmp_path):
    _, _, errors = command("peer", "--name", "nobody", "--store", tmp_path / "store")
    assert "nobody" in errors
    _, _, errors = command("bench", "bundle-that-is-missing", "--out", tmp_path / "p.json")
    assert "--peers is for" not in errors
    _, out, errors = command("doctor", "--json")
    assert "findings" in json.loads(out), errors


@pytest.mark.parametrize("name", ["run", "predict", "serve", "peer", "apply"])
def test_the_help_names_each_variable(command, name):
    code, out, _ = command(name, "--help")
    assert code == 0
    assert all(f"LS_EDGE_{variable}" in out for variable in ("PEERS", "BUNDLE", "SECRET_KEY"))


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "{bundle}", "--duration", "0.02", "--threads", "1", "--out"],
        ["eval", "{bundle}", "--data", "digits", "--limit", "2", "--orders", "2", "--figure"],
        ["analyze", "{bundle}", "--data", "digits", "--limit", "2", "--orders", "2", "--report"],
    ],
    ids=lambda words: words[0],
)
@pytest.mark.leaks_ok  # what draws keeps threads for the process
def test_only_files_of_the_command_are_replaced(command, bundle, tmp_path, words):
    filled = [word.format(bundle=bundle) for word in words]
    new, notes = tmp_path / "new", tmp_path / "peers.yaml"
    notes.write_text("peers: []\n", encoding="utf-8")
    code, _, errors = command(*filled, notes)
    assert code == 2
    assert "peers.yaml exists and is not a file of this command; name another file, or remove it" in errors
    assert notes.read_text(encoding="utf-8") == "peers: []\n"
    new.touch()  # an empty file is nobody's
    for _ in range(2):
        code, _, errors = command(*filled, new)
        assert code in (0, 3), errors


def test_a_plan_replaces_a_file_only_with_overwrite(command, bundle, tmp_path):
    profile, out = tmp_path / "a.json", tmp_path / "peers.yaml"
    code, _, errors = command("bench", bundle, "--duration", 0.02, "--threads", 1, "--name", "a", "--out", profile)
    assert code in (0, 3), errors  # 3 if this machine throttles
    out.write_text("# mine\n", encoding="utf-8")
    plan = [
        "plan",
        "--bundle",
        bundle,
        "--profiles",
        profile,
        "--objective",
        "latency",
        "--out",
        out,
    ]
    code, _, errors = command(*plan)
    assert code == 2
    assert "peers.yaml exists; name another file with --out, or replace it with --overwrite" in errors
    assert out.read_text(encoding="utf-8") == "# mine\n"
    code, _, errors = command(*plan, "--overwrite")
    assert code == 0, errors
    assert "ls-edge plan" in out.read_text(encoding="utf-8")


@pytest.fixture
def calls(bundle):
    """Arguments of the commands that open engines here, without ``--provider``."""
    timing = ("--threads", 1, "--duration", 0.02)
    return {
        "bench": (bundle, *timing, "--json"),
        "run": ("--local", 1, "--bundle", bundle, "--data", "digits", "--limit", 2, "--json"),
    }


def test_engines_use_the_chosen_provider(command, calls):
    code, printed, errors = command("bench", *calls["bench"], "--provider", "cpu")
    assert code == 0, errors
    assert json.loads(printed)["provider"] == "CPUExecutionProvider"


@pytest.mark.parametrize("name", ["bench", "run"])
def test_a_provider_that_onnxruntime_lacks_is_one_line(command, calls, name):
    code, printed, errors = command(name, *calls[name], "--provider", "NoSuchExecutionProvider")
    assert (code, printed) == (1, "")
    assert errors.splitlines()[-1].startswith("ls-edge: NoSuchExecutionProvider is not in this build of onnxruntime")


WRITTEN = ("out", "report", "figure", "freedom", "trace", "trace_events")


def _options(command):
    for one in getattr(command, "commands", {"": command}).values():
        yield from (option for option in one.params if isinstance(option, click.Option))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_output_is_checked_before_any_work(name):
    for option in _options(cli.get_command(click.Context(cli), name)):
        if option.name in WRITTEN and not option.is_flag:
            for place in ("/proc/self/x", "/proc/nowhere/x"):
                with pytest.raises(UsageError, match="cannot write /proc"):
                    option.callback(None, option, Path(place))
        if option.name == "as_json":
            assert option.callback is not None


@pytest.mark.parametrize(
    "words",
    [
        ("eval", "", "--data", "digits"),
        ("train", "--data", "digits", "--out", ""),
        ("export", "", "--out", "bundle"),
        ("predict", "--bundle", "", "cat.png"),
        ("keys", "new", "orin-0", "--out", ""),
        ("report", ""),
    ],
)
def test_an_empty_path_is_not_the_working_folder(command, tmp_path, monkeypatch, words):
    """A shell passes an unset variable in quotes as an empty text."""
    monkeypatch.chdir(tmp_path)
    code, _, errors = command(*words)
    assert code == 2
    assert "the path is empty; name a file or folder" in errors
    assert not list(tmp_path.iterdir())
