"""``ls-edge report``: runs as the command prints them, compared."""

import json

import pytest

from ls_edge.core.text import show_ms
from ls_edge.runtime.peer.peer import Peer


@pytest.mark.leaks_ok  # the library that packs the charts' scripts keeps its threads
def test_runs_are_compared(command, bundle, write_peers, serve, tmp_path):
    path, runs = write_peers({"a": [0, 1], "b": [2, 3]}), {}
    for name in "ab":
        serve(Peer.open(path, name, bundle))
    for policy in ("nearest", "random"):
        code, printed, errors = command(
            *("run", "--peers", path, "--bundle", bundle, "--data", "digits", "--limit", 6, "--json"),
            *("--policy", policy),
        )
        assert code == 0, errors
        runs[tmp_path / f"{policy}.json"] = json.loads(printed)
    for file, document in runs.items():
        file.write_text(json.dumps(document), encoding="utf-8")
    out = tmp_path / "compared.html"
    code, printed, errors = command("report", *runs, "--out", out)
    assert code == 0, errors
    page = out.read_text(encoding="utf-8")
    for file, document in runs.items():
        (line,) = (line for line in printed.splitlines() if line.startswith(file.name))
        assert f"6 of {document['requests']}" in line
        assert show_ms(document["latency_ms"]["p50"]) in line
        assert show_ms(document["latency_ms"]["p50"]) in page.replace("\u00a0", " ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file or directory"),
        ("[]", "is not a run: the file is []"),
        ("{}", "the key 'requests' is missing here"),
        ("no JSON", "not JSON, expecting value"),
    ],
)
def test_other_files_are_named(command, tmp_path, text, words):
    path = tmp_path / "other.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    code, _, error = command("report", path)
    assert code == 1
    assert str(path) in error
    assert words in error
    assert error.count("\n") == 1
