"""``ls-edge keys new``: what it prints goes into peers.yaml as it is."""

import pytest
import zmq.auth

from ls_edge.cli.main import main
from ls_edge.core.peers_file import load_peers


def keys_new(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["keys", "new", *arguments])
    return ended.value.code, capsys.readouterr()


def test_the_printed_lines_make_a_peers_file(tmp_path, capsys):
    code, peer = keys_new(capsys, "orin-0", "--out", str(tmp_path))
    assert code == 0
    code, source = keys_new(capsys, "laptop", "--out", str(tmp_path))
    assert code == 0
    path = tmp_path / "peers.yaml"
    path.write_text(
        f"sources:\n  {source.out.splitlines()[1]}\npeers:\n  - name: orin-0\n    address: tcp://10.0.0.1:5555\n"
        f"    blocks: [0]\n    {peer.out.splitlines()[0]}\n"
    )
    file = load_peers(path)
    assert file.uses_keys
    assert file.peers[0].public_key.encode() == zmq.auth.load_certificate(tmp_path / "orin-0.key")[0]
    assert file.sources[0].public_key.encode() == zmq.auth.load_certificate(tmp_path / "laptop.key_secret")[0]


def test_the_secret_is_never_printed(tmp_path, capsys):
    _, printed = keys_new(capsys, "a", "--out", str(tmp_path))
    secret = zmq.auth.load_certificate(tmp_path / "a.key_secret")[1].decode()
    assert secret not in printed.out + printed.err
    assert "a.key_secret" in printed.err


def test_a_second_time_is_an_error(tmp_path, capsys):
    keys_new(capsys, "a", "--out", str(tmp_path))
    before = (tmp_path / "a.key_secret").read_bytes()
    code, printed = keys_new(capsys, "a", "--out", str(tmp_path))
    assert (code, printed.out) == (2, "")
    assert "exists and is not overwritten" in printed.err
    assert (tmp_path / "a.key_secret").read_bytes() == before
