"""``ls-edge doctor``: one JSON document, a table, and the exit code."""

import json
import subprocess
import sys

import pytest

from ls_edge.cli import diagnostics
from ls_edge.cli.diagnostics import Finding
from ls_edge.cli.main import main


def test_this_hardware():
    done = subprocess.run(
        [sys.executable, "-m", "ls_edge", "doctor", "--json"], capture_output=True, text=True, timeout=170, check=False
    )
    document = json.loads(done.stdout)
    assert set(document) == {"status", "findings"}
    assert all(set(finding) == {"status", "what", "detail", "fix"} for finding in document["findings"])
    seen = {finding["what"]: finding["status"] for finding in document["findings"]}
    assert {"Python", "msgspec", "pyzmq", "libzmq", "CPU", "cores", "disk"} <= set(seen)
    assert seen["Python"] == "ok"
    assert done.returncode == (1 if "bad" in seen.values() else 0)
    assert all(finding["fix"] for finding in document["findings"] if finding["status"] != "ok")


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("bad", 1)])
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_exit_code_and_output(monkeypatch, capsys, status, code, flags):
    findings = [Finding("ok", "Python", "3.10"), Finding(status, "engines", "[none]", "pip install 'x[cpu]'")]
    monkeypatch.setattr(diagnostics, "examine", lambda: findings)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *flags])
    assert ended.value.code == code
    printed = capsys.readouterr().out
    if flags:
        assert json.loads(printed)["status"] == status
    else:
        assert status in printed
        assert "[none]" in printed
        assert "x[cpu]" in printed
