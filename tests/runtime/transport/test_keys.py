"""CURVE keys: made, read by pyzmq itself, refused where others may read them."""

import os
import re
import stat

import pytest
import zmq
import zmq.auth

from ls_edge.core.errors import LinkError, UsageError
from ls_edge.runtime.transport import keys
from ls_edge.runtime.transport.keys import KeyPair, load_secret, new_keys


def test_pyzmq_reads_what_was_written(tmp_path):
    pair, public_path, secret_path = new_keys("orin-0", tmp_path / "new" / "folder")
    assert (public_path.name, secret_path.name) == ("orin-0.key", "orin-0.key_secret")
    assert zmq.auth.load_certificate(public_path) == (pair.public, None)
    assert zmq.auth.load_certificate(secret_path) == (pair.public, pair.secret)
    assert zmq.curve_public(pair.secret) == pair.public
    assert load_secret(secret_path) == pair
    assert pair.secret not in public_path.read_bytes()
    assert pair.secret.decode() not in repr(pair)


def test_reads_what_pyzmq_wrote(tmp_path):
    _, secret_path = zmq.auth.create_certificates(tmp_path, "server")
    os.chmod(secret_path, 0o600)
    assert load_secret(secret_path) == KeyPair(*zmq.auth.load_certificate(secret_path))


def test_the_secret_is_private_from_the_moment_it_exists(tmp_path, monkeypatch):
    modes = []
    really = os.open

    def spy(path, flags, mode=0o777):
        descriptor = really(path, flags, mode)
        modes.append((os.path.basename(path), stat.S_IMODE(os.fstat(descriptor).st_mode), bool(flags & os.O_EXCL)))
        return descriptor

    monkeypatch.setattr(keys.os, "open", spy)
    before = os.umask(0)
    try:
        secret_path = new_keys("a", tmp_path)[2]
    finally:
        os.umask(before)
    assert modes == [("a.key_secret", 0o600, True), ("a.key", 0o644, True)]
    assert stat.S_IMODE(secret_path.stat().st_mode) == 0o600


@pytest.mark.parametrize("there", ["a.key", "a.key_secret"])
def test_nothing_is_overwritten(tmp_path, there):
    (tmp_path / there).write_text("mine")
    with pytest.raises(UsageError, match=re.escape(f"{there} exists and is not overwritten")):
        new_keys("a", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "mine"


@pytest.mark.parametrize("name", ["", "../a", "a/b", ".a", "a b", "a\n", "x" * 64, "-a"])
def test_names_stay_inside_the_folder(tmp_path, name):
    with pytest.raises(UsageError, match="use 1 to 63 letters"):
        new_keys(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_a_secret_that_others_may_read_is_refused(tmp_path, mode):
    _, _, path = new_keys("a", tmp_path)
    path.chmod(mode)
    with pytest.raises(UsageError, match=re.escape(f"(mode {mode:04o}); run: chmod 600 {path}")):
        load_secret(path)


def test_files_without_a_secret_key_are_refused(tmp_path):
    _, public_path, path = new_keys("a", tmp_path)
    with pytest.raises(UsageError, match="no such secret key; make one with 'ls-edge keys new NAME'"):
        load_secret(tmp_path / "missing")
    with pytest.raises(UsageError, match="cannot read the secret key"):
        load_secret(tmp_path)
    public_path.chmod(0o600)
    with pytest.raises(UsageError, match=r"it is a public key, give the \.key_secret"):
        load_secret(public_path)
    for content in (b"\xff\x00 nonsense", b"\n" * 65536):
        path.write_bytes(content)
        with pytest.raises(UsageError, match="holds no CURVE secret key"):
            load_secret(path)
    path.write_bytes(b'curve\n    secret-key = "' + b"#" * 40 + b'"\n')
    with pytest.raises(UsageError, match="not valid Z85"):
        load_secret(path)


def test_libzmq_without_curve(tmp_path, monkeypatch):
    monkeypatch.setattr(keys.zmq, "has", lambda what: False)
    with pytest.raises(LinkError, match="built without CURVE"):
        new_keys("a", tmp_path)
    with pytest.raises(LinkError, match="built without CURVE"):
        load_secret(tmp_path / "a.key_secret")
    assert list(tmp_path.iterdir()) == []
