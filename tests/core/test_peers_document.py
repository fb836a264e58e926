"""``docs/peers.md`` and the code that reads peers.yaml know the same keys, defaults and values."""

from pathlib import Path

import msgspec
import pytest
import yaml
from zmq.utils import z85

from ls_edge.core import peers_file
from ls_edge.core.peers_file import HeartbeatSettings, PeerConfig, SourceEntry, load_peers

TEXT = (Path(__file__).parents[2] / "docs" / "peers.md").read_text(encoding="utf-8")
SECTIONS = {
    "At the top": peers_file.PeersDocument,
    "A source": SourceEntry,
    "A peer": PeerConfig,
    "Heartbeat": HeartbeatSettings,
}
NONE = {
    "provider": "the best available", "threads": "the engine's choice",
    "public_key": "none", "gpu_mem_limit": "none", "A source: threads": "one", "cpus": "all cores",
    "interval_ms": "a quarter of `timeout_ms`, at most 250",
}  # fmt: skip
BY_OTHERS = {"bind": "the `address`", "credits": "four times `max_batch`, at least 16"}


def rows(heading):
    """Key, type, default and example of each row below a heading."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert all(len(row) == 5 for row in cells)
    return {key.strip("`"): (kind, default, example.strip("`")) for key, kind, default, example, _ in cells}


@pytest.mark.parametrize("heading", SECTIONS)
def test_keys_and_defaults_in_the_document_match_the_code(heading):
    said = {key: default.strip("`") for key, (_, default, _) in rows(heading).items()}
    expected = {}
    for field in msgspec.structs.fields(SECTIONS[heading]):
        if field.required:
            expected[field.name] = "required"
        elif isinstance(field.default, HeartbeatSettings):
            expected[field.name] = "all defaults"
        elif field.name in BY_OTHERS:
            expected[field.name] = BY_OTHERS[field.name].strip("`")
        elif field.default is None:
            expected[field.name] = NONE.get(f"{heading}: {field.name}", NONE.get(field.name, "")).strip("`")
        else:
            default = [] if field.default is msgspec.NODEFAULT else field.default
            expected[field.name] = default if isinstance(default, str) else yaml.safe_dump(default).split("\n")[0]
    assert said == expected


def file_with(heading, key, value):
    """A file that has a key set to a value, and is otherwise plain."""
    file = {"peers": [{"name": "b", "address": "tcp://127.0.0.1:5599", "blocks": [0]}]}
    if heading == "A peer":
        file["peers"][0][key] = value
        if key == "address":
            file["insecure"] = True
    elif heading == "A source":
        file["sources"] = [{"name": "s", key: value}]
    elif heading == "Heartbeat":
        file["heartbeat"] = {key: value} | ({"timeout_ms": 1000} if key == "interval_ms" else {"interval_ms": 100})
    else:
        file[key] = value
    if key in ("public_key", "sources", "may_push"):
        return None  # tried in the example, since one key alone is an error
    if key == "bind":
        file["insecure"] = True
    return file


EXAMPLES = [(heading, key, example) for heading in SECTIONS for key, (_, _, example) in rows(heading).items()]


@pytest.mark.parametrize(("heading", "key", "example"), EXAMPLES, ids=[f"{h}: {key}" for h, key, _ in EXAMPLES])
def test_the_example_of_each_key_is_accepted(tmp_path, heading, key, example):
    value = yaml.safe_load(example)
    file = file_with(heading, key, value)
    if file is None:
        assert len(z85.decode(value)) == 32 if key == "public_key" else value
        return
    path = tmp_path / "peers.yaml"
    path.write_text(yaml.safe_dump(file), encoding="utf-8")
    read = load_peers(path)
    if key == "cpus":
        assert (read.peers if heading == "A peer" else read.sources)[0].cpus
    elif heading == "A peer" and key != "blocks":
        assert getattr(read.peers[0], key) == value
    elif heading == "Heartbeat":
        assert getattr(read.heartbeat, key) == value
