"""``ls-edge peers new``: a fleet from the names of its boards."""

import shlex

import pytest
import yaml
import zmq

from ls_edge.core.bundle import Bundle
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.clients.sender import pusher_name
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.transport.keys import load_secret

pytestmark = pytest.mark.skipif(not zmq.has("curve"), reason="libzmq was built without CURVE")


def test_the_written_file_and_keys_start_a_fleet(command, bundle, tmp_path):
    out = tmp_path / "fleet"
    hosts = ["127.0.0.1", "2e3=127.0.0.1", "orin-2.local", "c=fd00::11", "[fd00::12]"]
    code, printed, errors = command("peers", "new", *hosts, "--source", "no", "--bundle", bundle, "--out", out)
    assert code == 0
    need = 90 + 1.05 * sum((bundle / f"blocks/{index:02d}.onnx").stat().st_size for index in range(4)) / 2**20
    for text in (errors, (out / "peers.yaml").read_text()):
        assert f"a peer with blocks 0-3 needs {need:,.0f} MiB of memory on a CPU" in text
    file = load_peers(out / "peers.yaml")
    file.of_model(Bundle.open(bundle).num_blocks)
    assert [(peer.name, peer.address, peer.bind, peer.blocks) for peer in file.peers] == [
        ("peer-0", "tcp://127.0.0.1:5555", "tcp://127.0.0.1:5555", (0, 1, 2, 3)),
        ("2e3", "tcp://127.0.0.1:5556", "tcp://127.0.0.1:5556", (0, 1, 2, 3)),
        ("orin-2", "tcp://orin-2.local:5555", "tcp://0.0.0.0:5555", (0, 1, 2, 3)),
        ("c", "tcp://[fd00::11]:5555", "tcp://[::]:5555", (0, 1, 2, 3)),
        ("peer-4", "tcp://[fd00::12]:5555", "tcp://[::]:5555", (0, 1, 2, 3)),
    ]
    assert pusher_name(file, load_secret(out / "no.key_secret")) == "no"
    for entry in file.peers:
        assert load_secret(out / f"{entry.name}.key_secret").public.decode() == entry.public_key
        assert (out / f"{entry.name}.key_secret").stat().st_mode & 0o777 == 0o600
    assert (out / ".gitignore").read_text() == "*.key_secret\n"
    starts = [shlex.split(line)[1:] for line in printed.splitlines() if line.startswith("ls-edge peer ")]
    assert [words[words.index("--name") + 1] for words in starts] == ["peer-0", "2e3", "orin-2", "c", "peer-4"]
    copies = [line for line in printed.splitlines() if line.startswith("scp ")]
    assert copies[2] == f"scp {out}/peers.yaml {out}/orin-2.key_secret orin-2.local:"
    peer = Peer.open(out / "peers.yaml", "2e3", store=tmp_path / "store", secret_key=out / "2e3.key_secret")
    peer.stop()
    peer.serve()


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (["a", "a"], "two boards are called 'a'; name them, for example a-b=a"),
        (["a b"], "'a b' is not a host; write orin-0, 10.0.0.11 or orin-0=10.0.0.11, without a port"),
        (["a=10.0.0.11:5556"], "'a=10.0.0.11:5556' is not a host"),
        (["a=0.0.0.0"], "'a=0.0.0.0' is not a host"),
        (["a=b c"], "'a=b c' is not a host"),
        (["a=[b]"], "'a=[b]' is not a host"),
        (["laptop"], "'laptop' is the source and a board"),
    ],
)
def test_bad_hosts_write_nothing(command, tmp_path, hosts, message):
    code, _, errors = command("peers", "new", *hosts, "--source", "laptop", "--out", tmp_path)
    assert (code, message in errors) == (2, True), errors
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(command, tmp_path):
    assert command("peers", "new", "a", "--source", "s", "--out", tmp_path)[0] == 0

    for again in (("a",), ("b", "--source", "t")):
        code, _, errors = command("peers", "new", *again, "--out", tmp_path)
        assert (code, "exists and is not overwritten" in errors) == (2, True)
    (tmp_path / "peers.yaml").unlink()
    assert "a.key exists" in command("peers", "new", "a", "--source", "t", "--out", tmp_path)[2].replace("_secret", "")


@pytest.fixture
def into(command, tmp_path):
    assert command("peers", "new", "a", "b", "c=10.0.0.3", "--source", "laptop", "--out", tmp_path)[0] == 0
    return tmp_path / "peers.yaml"


def restyled(path, style):
    """Write a file in another style, with comments around the entries where the style allows them."""
    document = yaml.safe_load(path.read_text())
    if style == "flow":
        path.write_text(yaml.safe_dump(document, default_flow_style=True))
    elif style != "as new":
        text = yaml.safe_dump(document, sort_keys=False)
        if style == "indented":
            text = "".join(f"  {line}" if line[0] in "- " else line for line in text.splitlines(keepends=True))
        if style == "sources last":
            head, _, tail = text.partition("peers:")
            text = f"peers:{tail.rstrip()}  # the last one\n# now the sources\n{head}"
        path.write_text(text)


@pytest.mark.parametrize("style", ["as new", "flow", "indented", "sources last"])
def test_boards_are_added_removed_and_replaced_in_files_of_any_style(command, into, tmp_path, style):
    restyled(into, style)
    before = load_peers(into)
    code, printed, errors = command("peers", "add", "d=10.0.0.3", "--into", into, "--out", tmp_path)
    assert code == 0, errors
    file = load_peers(into)
    assert file.peers[:3] == before.peers
    added = file.peer("d")
    assert (added.address, added.blocks) == ("tcp://10.0.0.3:5556", before.peers[0].blocks)
    assert load_secret(tmp_path / "d.key_secret").public.decode() == added.public_key
    assert f"ls-edge apply {into} " in printed
    assert f"scp {into} {tmp_path}/d.key_secret 10.0.0.3:" in printed
    for name in ("b", "d", "a"):
        assert command("peers", "remove", name, "--into", into)[0] == 0
    assert load_peers(into).peers == before.peers[2:]
    assert load_peers(into).sources == before.sources
    code, _, errors = command("peers", "remove", "c", "--into", into)
    assert (code, "'c' is the only peer" in errors) == (2, True)
    assert command("peers", "replace", "c", "--into", into, "--out", tmp_path / "new")[0] == 0
    after = load_peers(into)
    assert after.peer("c").public_key != before.peer("c").public_key
    assert load_secret(tmp_path / "new" / "c.key_secret").public.decode() == after.peer("c").public_key
    if style == "sources last":
        assert "# now the sources" in into.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["add", "a"], "already has 'a'"),
        (["add", "laptop"], "already has 'laptop'"),
        (["add", "d", "--blocks", "3-"], "blocks"),
        (["remove", "d"], "unknown peer 'd'"),
        (["replace", "d"], "unknown peer 'd'"),
    ],
)
def test_a_refused_edit_changes_nothing(command, into, tmp_path, words, message):
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    code, _, errors = command("peers", *words, "--into", into, *(["--out", tmp_path] if words[0] != "remove" else []))
    assert (code, message in errors) == (2, True), errors
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
