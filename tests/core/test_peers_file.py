"""peers.yaml: reading, and mistakes with their line and column."""

import os

import pytest

from ls_edge.core.errors import ConfigError
from ls_edge.core.peers_file import is_loopback, is_name, load_peers

KEYS = ["a" * 40, "b" * 40, "!/*?&<>()[]{}@%$#.-:+=^" + "c" * 17]


def load(tmp_path, text):
    path = tmp_path / "peers.yaml"
    path.write_text(text)
    return load_peers(path)


def failure(tmp_path, text):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    error = caught.value
    assert error.line is not None
    assert str(error).startswith(f"{tmp_path / 'peers.yaml'}:{error.line}:{error.column}: ")
    assert "\n" not in str(error)
    assert error.exit_code == 2
    return error


def test_every_key_is_read(tmp_path):
    file = load(
        tmp_path,
        f"""
sources:
  - {{name: laptop, public_key: "{KEYS[0]}"}}
heartbeat: {{interval_ms: 20, timeout_ms: 60}}
peers:
  - name: orin-0
    address: tcp://10.0.0.11:5555
    bind: tcp://0.0.0.0:5555
    blocks: "0-3, 7"
    public_key: "{KEYS[1]}"
    engine: tensorrt
    provider: CUDAExecutionProvider
    threads: 2
    max_batch: 4
    codec: fp16
    credits: 8
  - {{name: nuc, address: "tcp://[fe80::1]:5555", blocks: [3, 1], public_key: "{KEYS[2]}"}}
""",
    )
    first, second = file.peers
    assert first.blocks == (0, 1, 2, 3, 7)
    assert (first.address, first.bind) == ("tcp://10.0.0.11:5555", "tcp://0.0.0.0:5555")
    assert (first.engine, first.provider, first.threads) == ("tensorrt", "CUDAExecutionProvider", 2)
    assert (first.codec, first.max_batch, first.credits) == ("fp16", 4, 8)
    assert second.blocks == (1, 3)
    assert second.bind == second.address
    assert (second.engine, second.codec, second.max_batch) == ("auto", "raw", 1)
    assert file.uses_keys
    assert file.sources[0].name == "laptop"
    assert file.heartbeat.timeout_ms == 60
    assert file.peer("nuc") is second
    file.of_model(8)
    with pytest.raises(ConfigError, match=r":9:13: peer 'orin-0' lists block 7, but the bundle has blocks 0 to 5"):
        file.of_model(6)
    with pytest.raises(ConfigError, match="unknown peer 'orin'; did you mean 'orin-0'"):
        file.peer("orin")


@pytest.mark.parametrize(("timeout", "every"), [(20, 5), (300, 75), (1000, 250), (60_000, 250)])
def test_heartbeats_follow_the_timeout(tmp_path, timeout, every):
    file = load(tmp_path, f"heartbeat: {{timeout_ms: {timeout}}}\npeers:\n" + A)
    assert (file.heartbeat.every_ms, file.heartbeat.timeout_ms) == (every, timeout)


def test_the_smallest_file_gets_the_defaults(tmp_path):
    file = load(tmp_path, "peers: [{name: a, address: 'tcp://127.0.0.1:5555', blocks: [0]}]")
    assert not file.uses_keys
    assert not file.insecure
    assert file.sources == ()
    assert (file.heartbeat.every_ms, file.heartbeat.timeout_ms) == (250, 1000)


def test_a_file_is_read_once_so_that_content_and_entries_agree():
    content = b"peers: [{name: a, address: 'tcp://127.0.0.1:5555', blocks: [0]}]"
    read_end, write_end = os.pipe()
    os.write(write_end, content)
    os.close(write_end)
    try:
        assert load_peers(f"/dev/fd/{read_end}").raw == content
    finally:
        os.close(read_end)


def test_keys_switch_curve_on_for_the_loopback_too(tmp_path):
    text = f"""
sources: [{{name: s, public_key: "{KEYS[0]}"}}]
peers: [{{name: a, address: "tcp://localhost:1", blocks: [0], public_key: "{KEYS[1]}"}}]
"""
    assert load(tmp_path, text).uses_keys


def test_insecure_is_accepted_without_keys(tmp_path):
    file = load(tmp_path, "insecure: true\npeers: [{name: a, address: 'tcp://10.0.0.1:5555', blocks: [0]}]")
    assert file.insecure
    assert not file.uses_keys


def peer(name="a", address="tcp://127.0.0.1:5555", blocks="[0]", more=""):
    return f"  - name: {name}\n    address: {address}\n    blocks: {blocks}\n{f'    {more}' if more else ''}\n"


@pytest.mark.parametrize(
    ("more", "held"),
    [("", 16), ("max_batch: 4", 16), ("max_batch: 16", 64), ("{max_batch: 16, credits: 5}", 5), ("credits: 3", 3)],
)
def test_credits_default_to_four_full_batches(tmp_path, more, held):
    lines = "".join(f"    {line}\n" for line in more.strip("{}").split(", ") if line)
    (entry,) = load(tmp_path, "peers:\n" + peer() + lines).peers
    assert entry.credits == held


A = peer()
KEYED = peer(address="tcp://10.0.0.1:1", more=f'public_key: "{KEYS[0]}"')
SOURCE = f'sources:\n  - {{name: s, public_key: "{KEYS[1]}"}}\n'


@pytest.mark.parametrize(
    ("text", "line", "column", "what"),
    [
        ("peers: []\n", 1, 8, "peers is []; it has to be a list of 1 to 1024 peers"),
        ("insecure: true\n", 1, 1, "the key 'peers' is missing"),
        ("peers:\n" + A + "peer: 1\n", 6, 1, "unknown key 'peer'; did you mean 'peers'?"),
        ("peers:\n" + peer(more="adress: x"), 5, 5, "unknown key 'adress'; did you mean 'address'?"),
        ("peers:\n" + peer(name="'a b'"), 2, 11, "name is 'a b'; it has to be 1 to 63 letters"),
        ("peers:\n" + peer(name="3"), 2, 11, 'at the end; put it in quotes: "3"'),
        ("peers:\n" + peer(address="10.0.0.1:5555"), 3, 14, "address is '10.0.0.1:5555'; it has to be tcp://host:port"),
        ("peers:\n" + peer(address="tcp://a:70000"), 3, 14, "it has to be tcp://host:port with a port from 1 to 65535"),
        ("peers:\n" + peer(address="tcp://a:0"), 3, 14, "it has to be tcp://host:port with a port from 1 to 65535"),
        ("peers:\n" + peer(address="'tcp://[:::]:1'"), 3, 14, "[:::] is not an IPv6 address; write for example [::1]"),
        ("peers:\n" + peer(address="'tcp://[1.2.3.4]:1'"), 3, 14, "[1.2.3.4] is not an IPv6 address"),
        ("peers:\n" + peer(address="tcp://::1:5555"), 3, 14, "it has to be tcp://host:port"),
        ("peers:\n" + peer(more="bind: 'tcp://[::g]:1'"), 5, 11, "it has to be tcp://host:port"),
        (
            "insecure: true\npeers:\n" + peer(address="tcp://0.0.0.0:5555"),
            4,
            14,
            "0.0.0.0 is not a host that other devices can reach; write the name",
        ),
        (
            "insecure: true\npeers:\n" + peer(address="tcp://*:5555"),
            4,
            14,
            "* is not a host that",
        ),
        (
            "insecure: true\npeers:\n" + peer(address="'tcp://[::]:5555'"),
            4,
            14,
            "[::] is not a host that",
        ),
        ("peers:\n" + peer(more="bind: ipc:///x"), 5, 11, "bind is 'ipc:///x'; it has to be tcp://host:port"),
        ("peers:\n" + peer(blocks="0-3,x"), 4, 13, "blocks is '0-3,x'; list at least one number, each once"),
        ("peers:\n" + peer(blocks="[]"), 4, 13, "blocks is []; list at least one number, each once, counted from 0"),
        ("peers:\n" + peer(blocks="[1, 1]"), 4, 13, "each once"),
        ("peers:\n" + peer(blocks="[-1]"), 4, 13, "counted from 0"),
        ("peers:\n" + peer(blocks="[0, x]"), 4, 13, "blocks is [0, 'x']; list at least one number"),
        ("peers:\n" + peer(more="threads: 0"), 5, 14, "threads is 0; it has to be a whole number from 1 to 1024"),
        ("peers:\n" + peer(more="max_batch: 0"), 5, 16, "max_batch is 0; it has to be a whole number"),
        ("peers:\n" + peer(more="credits: -1"), 5, 14, "credits is -1; it has to be a whole number from 1 to 65535"),
        (
            "peers:\n" + peer(more="engine: openvino"),
            5,
            13,
            "engine is 'openvino'; it has to be one of auto, onnx, tensorrt",
        ),
        (
            "peers:\n" + peer(more="public_key: short"),
            5,
            17,
            "public_key is 5 characters; it has to be 40",
        ),
        ("peers:\n" + A + peer(address="tcp://127.0.0.1:5556"), 6, 11, "the name 'a' is used twice"),
        ("peers:\n" + A + peer(name="b"), 7, 14, "'b' has the address of 'a', tcp://127.0.0.1:5555"),
        ("sources: [{name: a}]\npeers:\n" + A, 3, 11, "the name 'a' is used twice"),
        ("sources: [{name: /}]\npeers:\n" + A, 1, 18, "name is '/'; it has to be 1 to 63"),
        ("sources: [{name: s, public_key: x}]\npeers:\n" + A, 1, 33, "public_key is 1 character; it has to be 40"),
        ("peers:\n" + peer(address="tcp://10.0.0.1:5555"), 3, 14, "is not on the loopback and has no public_key"),
        ("peers:\n" + peer(more="bind: tcp://0.0.0.0:5555"), 5, 11, "bind 'tcp://0.0.0.0:5555' of peer 'a' is not on"),
        (SOURCE + "peers:\n" + KEYED + peer(name="b"), 8, 5, "'b' has no public_key while others have"),
        (
            SOURCE + "peers:\n" + KEYED + peer(name="b", address="tcp://10.0.0.2:1", more=f'public_key: "{KEYS[0]}"'),
            11,
            17,
            "'b' has the public_key of 'a'; make its own with 'ls-edge keys new b'",
        ),
        (SOURCE.replace(KEYS[1], KEYS[0]) + "peers:\n" + KEYED, 7, 17, "'a' has the public_key of 's'; make its own"),
        (SOURCE + "peers:\n" + A, 4, 5, "'a' has no public_key while others have"),
        ("sources:\n  - name: s\npeers:\n" + KEYED, 2, 5, "'s' has no public_key while others have"),
        ("peers:\n" + KEYED, 1, 1, "no source is listed, so no process may send images"),
        ("insecure: true\n" + SOURCE + "peers:\n" + KEYED, 1, 11, "contradict each other; remove one"),
        (
            "heartbeat: {interval_ms: 100, timeout_ms: 150}\npeers:\n" + A,
            1,
            12,
            "must be at least twice the interval",
        ),
        (
            "heartbeat: {timeout_ms: 600001}\npeers:\n" + A,
            1,
            25,
            "it has to be a whole number from 20 to 600000",
        ),
        (
            "heartbeat: {slowest_mbit: 0}\npeers:\n" + A,
            1,
            27,
            "it has to be a number from 0.01 to 1000000",
        ),
        ("heartbeat: {slowest_mbit: .nan}\npeers:\n" + A, 1, 27, "slowest_mbit is '.nan'; it has to be a number"),
        ("heartbeat: {timeout_ms: 19}\npeers:\n" + A, 1, 25, "timeout_ms is 19; it has to be a whole number from 20"),
        (
            "heartbeat: {interval_ms: 250, timeout_ms: 300}\npeers:\n" + A,
            1,
            12,
            "must be at least twice the interval",
        ),
        ("heartbeat: {interval_ms: 1}\npeers:\n" + A, 1, 26, "interval_ms is 1; it has to be a whole number from 5"),
    ],
)
def test_mistakes_are_reported_with_line_and_column(tmp_path, text, line, column, what):
    error = failure(tmp_path, text)
    assert what in str(error)
    assert (error.line, error.column) == (line, column)


def test_only_loopback_addresses_count_as_loopback():
    for address in ("tcp://127.0.0.1:1", "tcp://127.3.2.1:1", "tcp://localhost:1", "tcp://[::1]:1"):
        assert is_loopback(address)
    for address in ("tcp://10.0.0.1:1", "tcp://0.0.0.0:1", "tcp://localhost.example:1", "tcp://[::]:1", "nonsense"):
        assert not is_loopback(address)


def test_ipv6_addresses_are_accepted_in_brackets(tmp_path):
    text = """
insecure: true
peers:
  - {name: a, address: "tcp://[::1]:5555", blocks: [0]}
  - {name: b, address: "tcp://[fe80::1%eth0.7]:5555", bind: "tcp://[::]:5555", blocks: [1]}
"""
    assert [peer.bind for peer in load(tmp_path, text).peers] == ["tcp://[::1]:5555", "tcp://[::]:5555"]
    assert not is_loopback("tcp://[fe80::1%eth0]:5555")


def test_names_are_restricted_to_safe_characters():
    assert is_name("orin-0.lab_2")
    assert not any(map(is_name, ("", "-a", "a/b", "a\n", "ä", "x" * 64)))
