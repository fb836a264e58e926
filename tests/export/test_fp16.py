"""Float16: for products only, with sums and residuals in float32."""

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from ls_edge.export.fp16 import to_half
from ls_edge.export.int8 import quantize_dynamic
from ls_edge.export.verify import RESIDUAL
from tests.export.onnx_models import TOKENS, session_of, types_of


def test_products_are_in_half_precision_and_sums_in_float32(traced):
    model = to_half(traced[0])
    onnx.checker.check_model(model, full_check=True)
    types = types_of(model)
    for node in model.graph.node:
        kinds = {types[name] for name in node.input} & {TensorProto.FLOAT, TensorProto.FLOAT16}
        if node.op_type == "MatMul":
            assert kinds == {TensorProto.FLOAT16}
        if node.op_type in ("LayerNormalization", "Softmax"):
            assert kinds == {TensorProto.FLOAT}
    adds = [n for n in model.graph.node if n.op_type == "Add"]
    residual = [n for n in adds if not {t.name for t in model.graph.initializer} & set(n.input)]
    assert len(residual) == 2
    assert all(types[n.output[0]] == TensorProto.FLOAT for n in residual)
    assert types["tokens"] == types["tokens_out"] == TensorProto.FLOAT
    assert len(model.SerializeToString()) < 0.6 * len(traced[0].SerializeToString())


def test_residuals_of_1500_stay_finite_in_true_half_precision(traced, loaded):
    tokens = np.random.default_rng(0).standard_normal((2, *TOKENS), dtype=np.float32)
    tokens *= RESIDUAL / np.abs(tokens).max()
    with torch.no_grad():
        expected = loaded.view.block(1, torch.from_numpy(tokens)).numpy()
    # numpy's float16 really rounds and overflows where a CPU engine may compute in float32 between the casts
    ours = ReferenceEvaluator(to_half(traced[1])).run(None, {"tokens": tokens})[0]
    assert np.isfinite(ours).all()
    assert np.abs(ours - expected).max() <= 2e-3 * np.abs(expected).max()
    with np.errstate(over="ignore"):
        assert not np.isfinite((tokens.astype(np.float16) ** 2).sum(axis=-1, dtype=np.float16)).all()


def test_a_gemm_that_is_more_than_a_layer_stays_one(traced):
    value = helper.make_tensor_value_info
    node = helper.make_node("Gemm", ["x", "w"], ["y"], alpha=0.5)
    weight = numpy_helper.from_array(np.eye(8, 5, dtype=np.float32), "w")
    graph = helper.make_graph([node], "g", [value("x", 1, ["batch", 8])], [value("y", 1, ["batch", 5])], [weight])
    model = to_half(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10))
    x = np.random.default_rng(1).standard_normal((3, 8), dtype=np.float32)
    found = session_of(model.SerializeToString()).run(None, {"x": x})[0]
    np.testing.assert_allclose(found, x[:, :5] / 2, rtol=0, atol=5e-3)


def test_a_gemm_with_a_bias_becomes_a_product_and_a_sum(traced):
    weight, bias = (np.random.default_rng(0).standard_normal(shape).astype(np.float32) for shape in ((5, 8), (5,)))
    node = helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=1)
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node], "g", [value("x", 1, ["batch", 8])], [value("y", 1, ["batch", 5])],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(bias, "b")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    x = np.random.default_rng(1).standard_normal((3, 8), dtype=np.float32)
    for changed, bar in ((to_half(model), 5e-3), (quantize_dynamic(model), 0.05)):
        onnx.checker.check_model(changed, full_check=True)
        found = session_of(changed.SerializeToString()).run(None, {"x": x})[0]
        np.testing.assert_allclose(found, x @ weight.T + bias, rtol=0, atol=bar)
    assert [node.op_type for node in to_half(model).graph.node] == ["Cast", "MatMul", "Add", "Cast"]
