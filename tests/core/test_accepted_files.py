"""During a change, a process accepts the entries of several files that do not contradict one another."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ls_edge.core.peers_file import HeldParts, PeerConfig, PeersFile, SourceEntry
from ls_edge.core.validation import SourceMap

NAMES = "abcd"
KEYS = [letter * 40 for letter in "stuvw"]


@st.composite
def files(draw):
    """A file whose entries have their own names, keys and addresses, as a file that was read."""
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1))
    keys = draw(st.permutations(KEYS))
    ports = draw(st.permutations(range(1, 6)))
    entries = [
        PeerConfig(
            name=name,
            address=f"tcp://h:{port}",
            blocks=HeldParts(sorted(draw(st.sets(st.integers(0, 5), min_size=1)))),
            public_key=key,
        )
        for name, key, port in zip(names, keys, ports, strict=False)
    ]
    source = SourceEntry(name=draw(st.sampled_from("xy")), public_key=keys[-1], may_push=draw(st.booleans()))
    path = Path("peers.yaml")
    return PeersFile(peers=tuple(entries), sources=(source,), path=path, raw=b"", _source_map=SourceMap(path))


@given(st.lists(files(), max_size=2), files(), st.lists(files(), max_size=2), st.sampled_from(NAMES))
def test_entries_never_contradict_one_another_and_the_newest_count(newer, own, older, name):
    merged = own.accepting(newer, older, name=name)
    entries = [*merged.peers, *merged.sources]
    for values in (
        [entry.name for entry in entries],
        [entry.public_key for entry in entries],
        [peer.address for peer in merged.peers],
    ):
        assert len(values) == len(set(values))
    found = {peer.name: peer for peer in merged.peers}
    assert [found[peer.name] for peer in own.peers if peer.name == name] == [p for p in own.peers if p.name == name]
    newest = (*newer, own)[0]
    for peer in newest.peers:
        mine = [p for p in own.peers if p.name == name]
        taken = any(peer.public_key == p.public_key or peer.address == p.address for p in mine)
        if peer.name != name and not taken:
            assert set(found[peer.name].blocks) >= set(peer.blocks)
            assert (found[peer.name].address, found[peer.name].public_key) == (peer.address, peer.public_key)
    # Nobody may push who could not by some of the files.
    pushers = {(s.name, s.public_key) for file in (*newer, own, *older) for s in file.sources if s.may_push}
    assert {(s.name, s.public_key) for s in merged.sources if s.may_push} <= pushers
