"""``docs/json.md`` is current, says what every key means, and describes what the commands print."""

import importlib.util
import json
import sys
from pathlib import Path

import msgspec
import pytest

from ls_edge.core.records import RequestRecord, encode_record

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("json_reference", ROOT / "docs" / "json_reference.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where types are looked up
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(reference):
    assert (ROOT / "docs" / "json.md").read_text(encoding="utf-8") == reference.reference(), "run make docs"


def test_every_key_has_a_meaning(reference):
    kinds = reference.structs()
    missing = {kind.__name__: [key for key, text in reference.meanings_of(kind).items() if not text] for kind in kinds}
    assert {name: keys for name, keys in missing.items() if keys} == {}
    used = {name for kind in kinds for key in kind.__struct_fields__ for name in (key, f"{kind.__name__}.{key}")}
    assert sorted(reference.WORDS.keys() - used) == []
    assert reference.TraceLine.__struct_fields__ == tuple(
        json.loads(encode_record(RequestRecord(0, "a.png", None, None, 0, False, None, (), 1, None)))
    )


OUTPUTS = {
    "verify --json": "verify {bundle} --json",
    "doctor --json": "doctor --json",
    "build --json": "build {bundle} --json",
    "status --check --json": "status --check --peers {peers} --json",
}


@pytest.mark.release
@pytest.mark.parametrize("title", OUTPUTS)
def test_documents_of_several_results_are_as_described(reference, command, tiny_bundle, write_peers, title):
    peers = write_peers({"a": range(3), "b": range(2, 6)})
    _, printed, errors = command(*OUTPUTS[title].format(bundle=tiny_bundle, peers=peers).split())
    document, kind = json.loads(printed), reference.DOCUMENTS[title]
    assert keys_of(document, msgspec.to_builtins(msgspec.convert(document, kind))) == [], errors


def keys_of(document, described):
    """Keys of a document that its struct lacks."""
    if isinstance(document, dict):
        more = [key for key in document if key not in described]
        return more or [found for key in document for found in keys_of(document[key], described[key])]
    if isinstance(document, list):
        return [found for one, other in zip(document, described, strict=True) for found in keys_of(one, other)]
    return []
