"""External weights are found in the bytes of an ONNX file, in any tensor."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ls_edge.engines.external_weights import has_weights_elsewhere

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
helper = onnx.helper


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


@pytest.mark.parametrize("place", sorted(PLACES))
def test_weights_are_found_wherever_they_are(place):
    assert has_weights_elsewhere(PLACES[place](True).SerializeToString())
    assert not has_weights_elsewhere(PLACES[place](False).SerializeToString())


def test_either_sign_is_enough():
    one, other = tensor(True), tensor(True)
    one.ClearField("external_data")
    other.ClearField("data_location")
    for each in (one, other):
        assert has_weights_elsewhere(model(initializers=[each]).SerializeToString())


def test_what_is_cut_off_is_not_trusted():
    raw = model(initializers=[tensor(False)]).SerializeToString()
    assert not has_weights_elsewhere(raw)
    assert all(has_weights_elsewhere(raw[:end]) for end in range(len(raw) - 1200, len(raw) - 10, 7))


@given(st.binary(max_size=200))
def test_any_bytes_have_an_answer(raw):
    assert has_weights_elsewhere(raw) in (True, False)
