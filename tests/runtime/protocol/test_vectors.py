"""The vectors and the tables of PROTOCOL.md are what the code does, in both directions."""

import json
import math

import msgspec
import numpy as np
import pytest

from ls_edge.core.errors import WireError
from ls_edge.runtime.protocol import codecs, framing
from ls_edge.runtime.protocol import messages as wire
from tests.runtime.protocol import generate

VECTORS = json.loads(generate.VECTORS.read_text(encoding="utf-8"))
AGAIN = "run 'python -m tests.runtime.protocol.generate', and read what has changed"


def named(key):
    return pytest.mark.parametrize("vector", VECTORS[key], ids=lambda vector: vector["name"])


def unplain(value):
    """What the JSON of a vector stands for."""
    if isinstance(value, list):
        return [unplain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"hex"}:
        return bytes.fromhex(value["hex"])
    if value.keys() == {"int"}:
        return int(value["int"])
    return {key: unplain(item) for key, item in value.items()}


def test_vectors_and_tables_are_current():
    assert generate.VECTORS.read_text(encoding="utf-8") == generate.vectors_text(), AGAIN
    text = generate.DOCUMENT.read_text(encoding="utf-8")
    assert generate.document(text) == text, AGAIN
    assert {vector["message"]["t"] for vector in VECTORS["messages"]} <= generate.STRUCTURES.keys()
    assert set(generate.EXAMPLES) == {kind.__struct_config__.tag for kind in wire.Message.__args__}
    assert {vector["codec"] for vector in VECTORS["tokens"]} == set(codecs.CODECS)


@named("messages")
def test_a_frame_is_its_fields(vector):
    frame = bytes.fromhex(vector["hex"])
    (read,) = framing.decode(frame)
    assert generate.fields_of(read) == vector["message"]
    message = msgspec.convert(unplain(vector["message"]), wire.Message)
    assert (framing.encode(message) == frame) is vector["canonical"]
    assert framing.decode(framing.encode(message)) == [read]


@named("several")
def test_several_messages_are_read_and_written(vector):
    frame = bytes.fromhex(vector["hex"])
    messages = [msgspec.convert(unplain(fields), wire.Message) for fields in vector["messages"]]
    assert framing.decode(frame) == messages
    if len(messages) > 1:
        assert framing.join([framing.encode_body(message) for message in messages]) == frame


@named("malformed")
def test_a_malformed_frame_is_refused_for_its_reason(vector):
    with pytest.raises(WireError) as caught:
        framing.decode(bytes.fromhex(vector["hex"]))
    assert str(caught.value).startswith(vector["reason"])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def _array(values):
    rows = [[math.nan if value is None else float(value) for value in row] for row in values]
    return np.array([rows], np.float32)


@named("tokens")
def test_tokens_are_read_and_written(vector):
    frame = bytes.fromhex(vector["hex"])
    read = codecs.decode(vector["codec"], frame, vector["count"], vector["dim"])
    np.testing.assert_array_equal(read, _array(vector["values"]))
    assert bytes(codecs.encode(vector["codec"], _array(vector["written_from"]))) == frame


@named("malformed_tokens")
def test_malformed_tokens_are_refused(vector):
    with pytest.raises(WireError):
        codecs.decode(vector["codec"], bytes.fromhex(vector["hex"]), vector["count"], vector["dim"])
