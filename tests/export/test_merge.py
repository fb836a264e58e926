"""Groups of blocks in one part, and the slots inside them."""

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from ls_edge.export.merge import group
from ls_edge.export.targets import PartsView
from tests.export.onnx_models import TOKENS, run, session_of


def test_a_group_of_blocks_computes_them_one_after_the_other(traced, loaded):
    grouped = group(traced)
    onnx.checker.check_model(grouped, full_check=True)
    tokens = np.random.default_rng(0).standard_normal((3, *TOKENS), dtype=np.float32)
    with torch.no_grad():
        expected = PartsView(loaded.view, 3).block(0, torch.from_numpy(tokens)).numpy()
    np.testing.assert_allclose(run(grouped, tokens), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_slots_inside_a_group_follow_the_parts_slot():
    """Blocks that multiply by 10 and add their slot reveal the slots and their order."""
    value = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Cast", ["slot"], ["slot_float"], name="cast", to=TensorProto.FLOAT),
        helper.make_node("Mul", ["tokens", "ten"], ["scaled"], name="mul"),
        helper.make_node("Add", ["scaled", "slot_float"], ["tokens_out"], name="add"),
    ]
    graph = helper.make_graph(
        nodes, "g", [value("tokens", 1, ["batch"]), value("slot", TensorProto.INT64, ["batch"])],
        [value("tokens_out", 1, ["batch"])], [numpy_helper.from_array(np.float32(10), "ten")],
    )  # fmt: skip
    block = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    grouped = group([block, block])
    onnx.checker.check_model(grouped, full_check=True)
    inputs = {"tokens": np.zeros(2, np.float32), "slot": np.array([0, 3])}
    found = session_of(grouped.SerializeToString()).run(None, inputs)[0]
    np.testing.assert_array_equal(found, [1, 67])
