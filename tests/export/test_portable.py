"""Rewritten graphs compute what the traced ones did, in the form that compilers and other toolchains read."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, version_converter

from ls_edge.export.canonical import canonicalize
from tests.export.onnx_models import model_of, session_of

X = np.random.default_rng(0).standard_normal((2, 5, 8), dtype=np.float32)


def traced(nodes, rest=(5, 8), inner=(), **constants):
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "g", [value("x", TensorProto.FLOAT, ["batch", 5, 8])], [value("y", TensorProto.FLOAT, ["batch", *rest])],
        [numpy_helper.from_array(np.array(array), name) for name, array in constants.items()],
        value_info=[value(name, TensorProto.FLOAT, ["batch", *shape]) for name, shape in inner],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def node(kind, inputs, output="y", **attributes):
    return helper.make_node(kind, inputs.split(), output.split(), **attributes)


ONES = np.float32([1] * 8)
NORM = node("LayerNormalization", "x s b", "n", axis=-1)
GRAPHS = {
    "gelu": (traced([node("Gelu", "x")]), "Div Erf Add Mul Mul"),
    "gelu with tanh": (traced([node("Gelu", "x", approximate="tanh")]), "Mul Mul Add Mul Mul Tanh Add Mul Mul"),
    "mean": (traced([node("ReduceMean", "x axes", keepdims=0)], (8,), axes=[1]), "ReduceMean"),
    "max": (traced([node("ReduceMax", "x axes", keepdims=0)], (8,), axes=[1]), "ReduceMax"),
    "sum": (traced([node("ReduceSum", "x axes", keepdims=0)], (8,), axes=[1]), "ReduceSum"),
    "attention": (
        traced(
            [node("Mul", "x s", "q"), node("Transpose", "x", "k", perm=[0, 2, 1]), node("MatMul", "q k")], (5, 5),
            s=np.float32(0.3),
        ),
        "Mul Transpose MatMul",
    ),
    "first token": (
        traced([NORM, node("Gather", "n i", axis=1)], (8,), s=ONES, b=ONES, i=0), "Gather LayerNormalization",
    ),
    "first token, and the others": (
        traced(
            [NORM, node("Gather", "n i", "t", axis=1), node("ReduceMean", "n a", "m", keepdims=0), node("Add", "t m")],
            (8,), a=[1], s=ONES, b=ONES, i=0,
        ),
        "LayerNormalization Gather ReduceMean Add",
    ),
    "halves": (
        traced(
            [node("Add", "x x", "d"), node("Split", "d", "a c", axis=2, num_outputs=2), node("Sub", "a c")], (5, 4),
            [("d", (5, 8))],
        ),
        "Add Slice Slice Sub",
    ),
    "thirds": (
        traced([node("Split", "x parts", "a c", axis=2), node("Concat", "c a", axis=2)], parts=[2, 6]),
        "Slice Slice Concat",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_a_rewritten_graph_computes_the_same(name):
    model, operators = GRAPHS[name]
    found = canonicalize(model, {})
    onnx.checker.check_model(found, full_check=True)
    assert [node.op_type for node in found.graph.node] == operators.split()
    wanted, ours = (session_of(m.SerializeToString()).run(None, {"x": X})[0] for m in (model, found))
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=2e-6)


def test_every_part_survives_the_converter_of_versions(exported):
    for name, _ in exported.manifest.part_names():
        newer = version_converter.convert_version(model_of(exported, name), 21)
        for found in (newer, version_converter.convert_version(newer, 17)):
            onnx.checker.check_model(found, full_check=True)


def test_keys_are_scaled_in_attention_and_queries_are_not(exported):
    nodes = model_of(exported, "block 0").graph.node
    maker = {name: node for node in nodes for name in node.output}
    (scores,) = (
        n for n in nodes if n.op_type == "MatMul" and n.input[1] in maker and maker[n.input[1]].op_type == "Transpose"
    )
    assert maker[scores.input[0]].op_type == "Squeeze"
    assert maker[maker[scores.input[1]].input[0]].op_type == "Mul"
