"""Commands whose results go onto a disk that becomes full: one line, exit code 1, and nothing half written."""

import os

import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.engines.pipeline import Pipeline

CONFIG = "model: {args: {embed_dim: 32, depth: 2}}\nbatch_size: 256\nprecision: fp32\n"


@pytest.fixture
def disk(small_disk):
    return small_disk(megabytes=2)


def fill(disk, left):
    """Leave so many bytes free."""
    free = os.statvfs(disk)
    (disk / "fill").write_bytes(bytes(free.f_bavail * free.f_frsize - left))


def entries(disk):
    return sorted(path.relative_to(disk).as_posix() for path in disk.rglob("*") if path.name != "fill")


def complaint(err):
    """The one line of an error."""
    assert "Traceback" not in err, err
    (line,) = [line for line in err.splitlines() if line.startswith("ls-edge: ") and "warning" not in line]
    return line


@pytest.mark.parametrize("left", [0, pytest.param(120_000, marks=pytest.mark.release)])
def test_export_on_a_full_disk_keeps_the_old_bundle(command, tiny_bundle, disk, left):
    run = tiny_bundle.parent / "run"
    assert command("export", run, "--out", disk / "old", "--per-block")[0] == 0
    before = {name: (disk / name).read_bytes() for name in entries(disk) if (disk / name).is_file()}
    fill(disk, left)
    for out in ("old", "new"):
        code, _, err = command("export", run, "--out", disk / out, "--per-block")
        assert (code, "No space left on device" in complaint(err)) == (1, True), err
        assert str(disk / out) in complaint(err)
        assert "space" in complaint(err)
    assert {name: (disk / name).read_bytes() for name in entries(disk) if (disk / name).is_file()} == before
    assert not (disk / "new").exists()
    with Pipeline.open(Bundle.open(disk / "old"), threads=1, provider="cpu"):
        pass


@pytest.mark.release
def test_training_on_a_full_disk_leaves_no_half_run(ls_edge, disk, tmp_path):
    (tmp_path / "train.yaml").write_text(CONFIG)
    fill(disk, 100_000)
    done = ls_edge.run(
        "train", "--data", "digits", "--config", tmp_path / "train.yaml", "--epochs", "1", "--out", disk / "run",
        timeout=120,
    )  # fmt: skip
    assert (done.returncode, "No space left on device" in complaint(done.stderr)) == (1, True), done.stderr
    assert not {"run/config.yaml", "run/model.safetensors"} & set(entries(disk))
    assert not [name for name in entries(disk) if name.endswith(".part")]


def test_a_profile_on_a_full_disk_is_a_failure(command, bundle, disk):
    fill(disk, 0)
    code, _, err = command("bench", bundle, "--out", disk / "profile.json", "--duration", "0.05", "--threads", "1")
    assert (code, "No space left on device" in complaint(err)) == (1, True), err
    assert entries(disk) == []


def test_json_for_a_full_disk_is_refused_before_the_run(ls_edge, bundle, disk):
    fill(disk, 0)
    for name in (disk / "run.json", "/dev/full"):
        with open(name, "w") as out:
            done = ls_edge.run(
                "run", "--local", 1, "--bundle", bundle, "--data", "digits", "--json", "--limit", 1, stdout=out
            )
        assert (done.returncode, "standard output: no space left" in complaint(done.stderr)) == (1, True), done.stderr
        assert "peer" not in done.stderr
