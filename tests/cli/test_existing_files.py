"""Files that a command did not write are not replaced by it."""

import pytest


@pytest.mark.parametrize(
    "words",
    [
        ["profile", "{bundle}", "--duration", "0.02", "--threads", "1", "--out"],
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
        assert code == 0, errors


def test_a_plan_replaces_a_file_only_with_overwrite(command, bundle, tmp_path):
    profile, out = tmp_path / "a.json", tmp_path / "peers.yaml"
    code, _, errors = command("profile", bundle, "--duration", 0.02, "--threads", 1, "--name", "a", "--out", profile)
    assert code == 0, errors
    out.write_text("# mine\n", encoding="utf-8")
    plan = [
        "plan",
        "--bundle",
        bundle,
        "--profiles",
        profile,
        "--objective",
        "latency",
        "--no-simulation",
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
