"""``docs/peers.md`` and the code that reads peers.yaml know the same keys, defaults and values."""

from pathlib import Path

import msgspec
import pytest
import yaml

from ls_edge.core import peers_file
from ls_edge.core.peers_file import HeartbeatSettings, PeerConfig, SourceEntry

TEXT = (Path(__file__).parents[2] / "docs" / "peers.md").read_text(encoding="utf-8")
SECTIONS = {
    "At the top": peers_file.PeersDocument,
    "A source": SourceEntry,
    "A peer": PeerConfig,
    "Heartbeat": HeartbeatSettings,
}
NONE = {
    "provider": "the best available", "threads": "the engine's choice",
    "public_key": "none", "gpu_mem_limit": "none", "A source: threads": "one",
    "interval_ms": "a quarter of `timeout_ms`, at most 250",
}  # fmt: skip
BY_OTHERS = {"bind": "the `address`", "credits": "four times `max_batch`, at least 16"}


def rows(heading):
    """Defaults of the keys below a heading; a row may have several keys."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert all(len(row) == 3 for row in cells)
    return {key.strip("`"): default for keys, default, _ in cells for key in keys.split(", ")}


@pytest.mark.parametrize("heading", SECTIONS)
def test_keys_and_defaults_in_the_document_match_the_code(heading):
    said = {key: default.strip("`") for key, default in rows(heading).items()}
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
    assert said.keys() == expected.keys()
    assert {key: default for key, default in said.items() if default not in ("as for a peer", expected[key])} == {}
