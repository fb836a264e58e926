"""Cache of built engines: keys, owners, locks, damaged entries, and a full disk."""

import os
import subprocess
import sys
import threading

import msgspec
import pytest

from ls_edge.core.errors import EngineError
from ls_edge.engines.tensorrt.cache import EngineCache, EngineKey, default_folder

KEY = EngineKey(
    onnx_sha256="ab" * 32,
    tensorrt="10.3.0",
    gpu="Orin",
    capability="8.7",
    multiprocessors=8,
    board="NVIDIA Jetson Orin Nano",
    profiles=((1, 1, 1), (2, 8, 8)),
    workspace=1 << 30,
)


@pytest.fixture
def cache(tmp_path):
    return EngineCache(tmp_path / "engines")


def builder(calls, engine=b"engine"):
    def build(timing):
        calls.append(timing)
        return engine, timing + b"t"

    return build


def never(timing):
    raise AssertionError("built again")


def test_an_engine_is_built_once_and_the_timing_is_shared(cache):
    calls, reported = [], []
    assert cache.get(KEY, builder(calls), reported.append) == b"engine"
    assert EngineCache(cache.folder).get(KEY, never) == b"engine"
    other = msgspec.structs.replace(KEY, onnx_sha256="cd" * 32)
    assert cache.get(other, builder(calls, b"other"), reported.append) == b"other"
    assert cache.get(KEY, never) == b"engine"
    assert calls == [b"", b"t"]
    assert reported == ["building an engine for TensorRT 10.3.0 on Orin"] * 2
    assert not [path for path in cache.folder.iterdir() if path.name.endswith(".part")]
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o022 == 0 for path in cache.folder.iterdir())


@pytest.mark.parametrize(
    "change",
    [
        {"multiprocessors": 6},
        {"board": "NVIDIA Jetson Orin NX"},
        {"tensorrt": "10.7.0"},
        {"gpu": "Thor", "capability": "11.0"},
        {"profiles": ((1, 1, 8),)},
        {"workspace": 1 << 20},
        {"system": "Linux riscv64"},
    ],
)
def test_a_change_of_anything_in_the_key_builds_the_engine_again(cache, change):
    cache.get(KEY, builder([]))
    calls = []
    cache.get(msgspec.structs.replace(KEY, **change), builder(calls))
    assert len(calls) == 1
    assert cache.get(KEY, never) == b"engine"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda engine, note: engine.write_bytes(b"engine2"),
        lambda engine, note: engine.write_bytes(b""),
        lambda engine, note: engine.unlink(),
        lambda engine, note: note.write_bytes(note.read_bytes()[:-9]),
        lambda engine, note: note.unlink(),
    ],
)
def test_a_damaged_entry_is_built_again(cache, spoil):
    cache.get(KEY, builder([]))
    spoil(cache.folder / f"{KEY.digest()}.engine", cache.folder / f"{KEY.digest()}.json")
    calls = []
    assert cache.get(KEY, builder(calls)) == b"engine"
    assert len(calls) == 1
    assert cache.get(KEY, never) == b"engine"


def test_forgotten_entries_and_failed_builds_are_built_again(cache):
    def fail(timing):
        raise EngineError("no memory")

    with pytest.raises(EngineError, match="no memory"):
        cache.get(KEY, fail)
    assert cache.get(KEY, builder([])) == b"engine"
    cache.forget(KEY)
    cache.forget(KEY)
    calls = []
    cache.get(KEY, builder(calls))
    assert len(calls) == 1


def test_on_a_full_disk_a_built_engine_is_used_without_being_kept(small_disk):
    folder = small_disk(1)
    cache = EngineCache(folder / "engines")
    (folder / "filler").write_bytes(bytes(1024 * 1024 - 12 * 1024))
    big = bytes(256 * 1024)
    reported = []
    assert cache.get(KEY, lambda timing: (big, b""), reported.append, must_keep=False) == big
    assert "No space left on device; make room" in reported[-1]
    with pytest.raises(EngineError, match="No space left on device; make room"):
        cache.get(KEY, lambda timing: (big, b""))
    (folder / "filler").unlink()
    assert cache.get(KEY, lambda timing: (big, b"")) == big
    assert cache.get(KEY, never) == big


def test_files_that_other_users_could_have_written_are_not_loaded(cache, monkeypatch):
    cache.get(KEY, builder([]))
    engine = cache.folder / f"{KEY.digest()}.engine"
    engine.chmod(0o666)
    with pytest.raises(EngineError, match=r"can be written by others \(mode 0666\)"):
        cache.get(KEY, never)
    engine.unlink()
    engine.symlink_to("/dev/null")
    with pytest.raises(EngineError, match="cannot read"):
        cache.get(KEY, never)
    cache.folder.chmod(0o777)
    with pytest.raises(EngineError, match="can be written by others"):
        EngineCache(cache.folder)
    cache.folder.chmod(0o700)
    (cache.folder.parent / "link").symlink_to(cache.folder)
    with pytest.raises(EngineError, match="is a link or not a folder"):
        EngineCache(cache.folder.parent / "link")
    (cache.folder.parent / "file").write_text("")
    with pytest.raises(EngineError, match="cannot use"):
        EngineCache(cache.folder.parent / "file")
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(EngineError, match=f"belongs to user {me}, this is user {me + 1}"):
        EngineCache(cache.folder)


def test_two_processes_that_need_the_same_engine_build_it_once(cache):
    calls, reported, started, go = [], [], threading.Event(), threading.Event()

    def slow(timing):
        calls.append(1)
        started.set()
        assert go.wait(10)
        return b"engine", b""

    def on_status(text):
        reported.append(text)
        if "waiting" in text:
            go.set()

    results = []
    first = threading.Thread(target=lambda: results.append(cache.get(KEY, slow)))
    first.start()
    assert started.wait(10)
    results.append(EngineCache(cache.folder).get(KEY, never, on_status))
    first.join(10)
    assert results == [b"engine", b"engine"]
    assert len(calls) == 1
    assert reported == ["waiting for another process that builds engines"]


def test_a_killed_builder_releases_the_lock(cache):
    program = (
        "import sys, pathlib, msgspec; from ls_edge.engines.tensorrt.cache import EngineCache, EngineKey\n"
        "def build(timing): print('builds', flush=True); sys.stdin.read()\n"
        "EngineCache(pathlib.Path(sys.argv[1])).get(msgspec.json.decode(sys.argv[2], type=EngineKey), build)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, cache.folder, msgspec.json.encode(KEY)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"builds\n"
        process.kill()
    assert cache.get(KEY, builder([])) == b"engine"


def test_a_full_disk_is_one_line_and_leaves_nothing(cache, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EngineError, match="No space left on device; make room"):
        cache.get(KEY, builder([]))
    assert not list(cache.folder.iterdir())


def test_the_folder_is_that_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("LS_EDGE_CACHE", str(tmp_path / "mine"))
    assert default_folder() == tmp_path / "mine/engines"
    monkeypatch.delenv("LS_EDGE_CACHE")
    assert default_folder().parts[-3:] == (".cache", "ls-edge", "engines")
