"""The interface of engines: arguments are checked, and weights in another file are found in any encoding."""

import numpy as np
import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import EngineError
from ls_edge.engines.engine import refuse_weights_elsewhere
from ls_edge.engines.onnxruntime import onnxruntime_module, open_session
from ls_edge.engines.opening import open_engine
from ls_edge.engines.providers import CPU
from tests.engines.reference import tokens

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
helper = onnx.helper


def test_inputs_are_checked_against_the_manifest(bundle):
    engine = open_engine(bundle, "block 0", threads=1)
    good = tokens(2)
    for inputs, words in (
        ({"tokens": good.astype(np.float64)}, r"tokens is float64 \[2, 16, 32\], must be tokens float32 \[B, 16, 32\]"),
        ({"tokens": good[:, :15]}, r"float32 \[2, 15, 32\]"),
        ({"tokens": good[0]}, r"float32 \[16, 32\]"),
        ({"tokens": good[:0]}, "B at least 1"),
        ({"images": good}, "takes tokens, received images"),
        ({"tokens": good, "slot": np.zeros(2, np.int64)}, "takes tokens, received tokens, slot"),
        ({}, "takes tokens"),
    ):
        with pytest.raises(EngineError, match=words):
            engine.run(inputs)


def tensor(elsewhere):
    found = onnx.numpy_helper.from_array(np.arange(300, dtype=np.float32), "w")
    if elsewhere:
        found.ClearField("raw_data")
        found.data_location = onnx.TensorProto.EXTERNAL
        found.external_data.add(key="location", value="/etc/hostname")
    return found


def model(nodes=(), initializers=(), sparse=(), functions=()):
    value = helper.make_tensor_value_info("x", 1, ["batch", 3])
    graph = helper.make_graph(nodes, "g", [value], [value], initializers, sparse_initializer=sparse)
    return helper.make_model(graph, functions=functions)


def constant(elsewhere):
    return helper.make_node("Constant", [], ["c"], value=tensor(elsewhere))


def sparse(elsewhere):
    indices = onnx.numpy_helper.from_array(np.arange(300, dtype=np.int64), "i")
    return helper.make_sparse_tensor(tensor(elsewhere), indices, [300])


PLACES = {
    "initializer": lambda e: model(initializers=[tensor(False), tensor(e)]),
    "sparse initializer": lambda e: model(sparse=[sparse(e)]),
    "constant": lambda e: model([constant(e)]),
    "constants": lambda e: model(
        [helper.make_node("Custom", [], ["c"], domain="d", values=[tensor(False), tensor(e)])]
    ),
    "branch": lambda e: model([helper.make_node("If", ["x"], ["y"], then_branch=model([constant(e)]).graph)]),
    "branches": lambda e: model(
        [helper.make_node("Custom", [], [], bodies=[model().graph, model([constant(e)]).graph])]
    ),
    "function": lambda e: model(
        functions=[helper.make_function("d", "F", ["x"], ["y"], [constant(e)], [helper.make_opsetid("", 20)])]
    ),
}


def refuses(raw):
    try:
        refuse_weights_elsewhere(raw, "block 0")
    except EngineError as error:
        return str(error) == "block 0 does not load: its weights are in another file; export it again"
    return False


@pytest.mark.parametrize("place", sorted(PLACES))
def test_weights_elsewhere_are_found_in_any_tensor(place):
    assert refuses(PLACES[place](True).SerializeToString())
    assert not refuses(PLACES[place](False).SerializeToString())


@pytest.mark.parametrize("tag", [b"\x0a", b"\x8a\x80\x80\x80\x70"])
@pytest.mark.parametrize("length", [b"\x08", b"\x88\x80\x00"])
def test_weights_elsewhere_are_found_in_encodings_that_protobuf_does_not_write(tiny_bundle, tag, length):
    """ONNX Runtime reads such an entry: its protobuf ignores bits of a tag above the 32nd."""
    entry = tag + length + b"location" + b"\x12\x01w"
    raw = Bundle.open(tiny_bundle).read("block 0")
    assert not refuses(raw)
    raw += b"\x72" + bytes([len(entry)]) + entry  # metadata, of the type that external data have
    found = onnxruntime_module().InferenceSession(raw, providers=[CPU]).get_modelmeta().custom_metadata_map
    assert found["location"] == "w"
    assert refuses(raw)


def test_a_name_that_contains_location_is_not_a_file():
    raw = model([helper.make_node("Identity", ["w.location.weight"], ["location_of_y"])]).SerializeToString()
    assert b"location" in raw
    assert not refuses(raw)


def test_onnxruntimes_own_format_is_refused(tiny_bundle, tmp_path):
    """It is not protobuf, so it was not searched."""
    ort = onnxruntime_module()
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "block.ort")
    ort.InferenceSession(Bundle.open(tiny_bundle).read("block 0"), options, providers=[CPU])
    raw = (tmp_path / "block.ort").read_bytes()
    assert ort.InferenceSession(raw, providers=[CPU]).get_inputs()
    with pytest.raises(EngineError, match=r"^block 0 does not load in onnxruntime"):
        open_session(raw, "block 0", provider=CPU, threads=1)
