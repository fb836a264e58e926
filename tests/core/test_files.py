"""Files that are replaced in one step, and locks on folders."""

import errno
import os
import subprocess
import sys

import pytest

from ls_edge.core.errors import LsEdgeError, UsageError
from ls_edge.core.files import (
    FolderInUse,
    check_folder,
    check_writable,
    folder_lock,
    open_output,
    remove_left_parts,
    write_file,
    write_output,
)


def test_a_file_is_replaced_in_one_step(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"before")
    with path.open("rb") as reader:
        write_file(path, b"after")
        assert reader.read() == b"before"
    assert path.read_bytes() == b"after"
    assert list(tmp_path.iterdir()) == [path]
    assert not path.stat().st_mode & 0o022


def test_an_error_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "f"
    path.write_text("before")

    def write():
        with open_output(path) as stream:
            stream.write("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch, call):
    path = tmp_path / "f"
    path.write_text("before")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if call == "write":
        monkeypatch.setattr("os.open", full)
    else:
        monkeypatch.setattr(*(("os.fsync", full) if call == "fsync" else ("pathlib.Path.replace", full)))
    with pytest.raises(OSError, match="No space left"):
        write_file(path, b"after")
    with pytest.raises(LsEdgeError, match=r"cannot write .*/f: No space left on device; free some space"):
        write_output(path, "after")
    monkeypatch.undo()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_in_the_way_is_not_followed(tmp_path):
    (tmp_path / f".f.{os.getpid()}.part").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        write_file(tmp_path / "f", b"")
    assert not (tmp_path / "elsewhere").exists()


def test_outputs_make_their_folders_and_write_to_pipes(tmp_path):
    write_output(tmp_path / "a/b/ä.txt", "ü\n")
    assert (tmp_path / "a/b/ä.txt").read_text(encoding="utf-8") == "ü\n"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_output(tmp_path / "pipe", "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


def test_outputs_that_cannot_be_written_are_refused_with_advice(tmp_path):
    (tmp_path / "file").write_text("")
    for path, why in (
        (tmp_path, "it is a folder; name a file"),
        (tmp_path / "file" / "x", f"{tmp_path / 'file'} is not a folder; give another path"),
    ):
        with pytest.raises(UsageError, match=rf"cannot write {path}: {why}"):
            check_writable(path)
    with pytest.raises(LsEdgeError, match="cannot write /dev/full: No space left on device"):
        check_writable("/dev/full")
    check_writable("/dev/null")
    check_writable(tmp_path / "new" / "x")
    with pytest.raises(UsageError, match=r"Not a directory; give another path"):
        write_output(tmp_path / "file" / "x" / "y", "")
    with pytest.raises(UsageError, match="is not the name of a file"):
        write_output("", "")


@pytest.mark.parametrize("path", ["/proc/self/x.html", "/proc/nowhere/x.html", "x" * 250 + ".html"])
def test_unwritable_paths_are_found_before_writing(tmp_path, path):
    with pytest.raises(UsageError, match=r"cannot write .*give another path"):
        check_writable(tmp_path / path)
    if path.startswith("/"):
        with pytest.raises(UsageError, match=r"cannot write .*give another path"):
            check_folder(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_a_full_disk_is_known_before_it_is_written_to(small_disk):
    disk = small_disk(megabytes=1)
    free = os.statvfs(disk)
    (disk / "fill").write_bytes(bytes(free.f_bavail * free.f_frsize))
    for check in (check_writable, check_folder):
        with pytest.raises(LsEdgeError, match="No space left on device; free some space"):
            check(disk / "new" / "x")
    assert [path.name for path in disk.iterdir()] == ["fill"]


@pytest.mark.processes
def test_a_folder_is_locked_until_its_holder_ends(tmp_path):
    program = (
        "import pathlib, sys\n"
        "from ls_edge.core.files import folder_lock\n"
        "with folder_lock(pathlib.Path(sys.argv[1])):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(FolderInUse, match=f"another process uses {tmp_path}; wait"), folder_lock(tmp_path):
            pass
        process.kill()
    with folder_lock(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_used_unlocked(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with folder_lock(tmp_path), folder_lock(tmp_path):
        pass


def test_parts_that_a_power_cut_left_are_removed_with_the_next_file(tmp_path):
    for name in (".engine.123.part", ".tmpVtIRh5", "engine"):
        (tmp_path / name).write_bytes(b"")
    remove_left_parts(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]
