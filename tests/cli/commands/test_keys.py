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
    code, source = keys_new(capsys, "12", "--out", str(tmp_path))
    assert code == 0
    path = tmp_path / "peers.yaml"
    path.write_text(
        f"sources:\n  {source.out.splitlines()[1]}\npeers:\n  - name: orin-0\n    address: tcp://10.0.0.1:5555\n"
        f"    blocks: [0]\n    {peer.out.splitlines()[0]}\n"
    )
    file = load_peers(path)
    assert file.uses_keys
    assert file.peers[0].public_key.encode() == zmq.auth.load_certificate(tmp_path / "orin-0.key")[0]
    assert file.sources[0].public_key.encode() == zmq.auth.load_certificate(tmp_path / "12.key_secret")[0]


def test_the_secret_is_never_printed(tmp_path, capsys):
    _, printed = keys_new(capsys, "a", "--out", str(tmp_path))
    secret = zmq.auth.load_certificate(tmp_path / "a.key_secret")[1].decode()
    assert secret not in printed.out + printed.err
    assert "a.key_secret" in printed.err


def test_existing_keys_are_not_overwritten(tmp_path, capsys):
    keys_new(capsys, "a", "--out", str(tmp_path))
    before = (tmp_path / "a.key_secret").read_bytes()
    code, printed = keys_new(capsys, "a", "--out", str(tmp_path))
    assert (code, printed.out) == (2, "")
    assert "exists and is not overwritten" in printed.err
    assert (tmp_path / "a.key_secret").read_bytes() == before


FILE = """\
# the file of the fleet
sources:
  - {name: laptop, may_push: true}  # mine
peers:
  - name: orin-0   # in the attic
    address: tcp://10.0.0.1:5555
    blocks: [0]
  - {address: "tcp://10.0.0.2:5555", blocks: "0", name: "orin-1"}
  - name: orin-2
    public_key:
    address: tcp://10.0.0.3:5555
    blocks: [0]
"""


def test_keys_go_into_the_file_and_the_rest_of_it_stays(tmp_path, capsys):
    path = tmp_path / "peers.yaml"
    path.write_text(FILE, encoding="utf-8")
    names = ("laptop", "orin-0", "orin-1", "orin-2")
    for name in names:
        code, printed = keys_new(capsys, name, "--out", str(tmp_path), "--into", str(path))
        assert code == 0
        assert f"wrote the public key of {name} to {path}" in printed.err
    keys = {name: zmq.auth.load_certificate(tmp_path / f"{name}.key")[0].decode() for name in names}
    file = load_peers(path)
    assert {one.name: one.public_key for one in (*file.sources, *file.peers)} == keys
    left = path.read_text(encoding="utf-8")
    for name in names:
        left = left.replace(f', public_key: "{keys[name]}"', "").replace(f'    public_key: "{keys[name]}"\n', "")
    assert left == FILE.replace("    public_key:\n", "")

    keys_new(capsys, "orin-0", "--out", str(tmp_path / "new"), "--into", str(path))  # a change of keys
    new = zmq.auth.load_certificate(tmp_path / "new" / "orin-0.key")[0].decode()
    assert load_peers(path).peer("orin-0").public_key == new != keys["orin-0"]
    assert load_peers(path).peer("orin-1").public_key == keys["orin-1"]


@pytest.mark.parametrize("content", [FILE, "", "peers: 3\n", "- a\n"])
def test_no_key_is_made_for_a_name_that_is_not_in_the_file(tmp_path, capsys, content):
    path = tmp_path / "peers.yaml"
    path.write_text(content, encoding="utf-8")
    code, printed = keys_new(capsys, "nuc", "--out", str(tmp_path), "--into", str(path))
    assert (code, printed.out) == (2, "")
    assert "'nuc' is neither a peer nor a source; write its entry first" in printed.err
    assert path.read_text(encoding="utf-8") == content
    assert not (tmp_path / "nuc.key").exists()
