"""Rewrites of a traced graph, so that more toolchains read it and compilers build faster engines from it.

- Opset 17: ``Gelu`` becomes its formula, which ONNX Runtime and TensorRT fuse again, axes become attributes, and
  ``Split`` becomes ``Slice``.
- Attention scales k instead of q. Compilers then keep a single product for q, k and v, with its bias.
- A head that uses a single token normalizes only that token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import onnx
from onnx import helper, numpy_helper

TRACED_OPSET = 20
"""Opset of the graphs that are rewritten."""
_GELU: dict[bytes, tuple[tuple[str | float, ...], ...]] = {
    b"none": (("Div", "x", math.sqrt(2)), ("Erf", "_"), ("Add", "_", 1.0), ("Mul", "x", "_"), ("Mul", "_", 0.5)),
    b"tanh": (
        ("Mul", "x", 0.044715), ("Mul", "_", "x"), ("Add", "_", 1.0), ("Mul", "_", "x"),
        ("Mul", "_", math.sqrt(2 / math.pi)), ("Tanh", "_"), ("Add", "_", 1.0), ("Mul", "x", "_"), ("Mul", "_", 0.5),
    ),
}  # fmt: skip
"""Steps of ``Gelu``: the operator and its inputs, where ``_`` is the result of the previous step."""


def portable(model: onnx.ModelProto) -> tuple[list[onnx.NodeProto], dict[str, onnx.TensorProto]]:
    """Return the rewritten nodes of a traced graph, and all constants by name."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    shapes = {value.name: [d.dim_value for d in value.type.tensor_type.shape.dim] for value in model.graph.value_info}
    shapes |= {name: list(tensor.dims) for name, tensor in constants.items()}
    nodes = [new for old in model.graph.node for new in _in_old_opset(old, constants, shapes)]
    uses = Counter([*(name for node in nodes for name in node.input), *(value.name for value in model.graph.output)])
    made_by = {name: node for node in nodes for name in node.output if uses[name] == 1}

    def is_scalar(name: str) -> bool:
        return name in constants and not constants[name].dims

    for node in list(nodes):
        before = [made_by[name] for name in node.input if name in made_by]
        kinds = [node.op_type, *(other.op_type for other in before)]
        if kinds == ["MatMul", "Mul", "Transpose"] and is_scalar(before[0].input[1]):
            scale, turn = before
            node.input[0], scale.input[0], turn.input[0] = scale.input[0], turn.input[0], scale.output[0]
            nodes.remove(scale)
            nodes.insert(nodes.index(turn), scale)
        elif (
            kinds == ["Gather", "LayerNormalization"]
            and is_scalar(node.input[1])
            and any((one.name, one.i) == ("axis", 1) for one in node.attribute)
        ):
            (norm,) = before
            node.input[0], norm.input[0] = norm.input[0], norm.output[0]
            node.output[0], norm.output[0] = norm.output[0], node.output[0]
            nodes.remove(norm)
            nodes.insert(nodes.index(node) + 1, norm)
    return nodes, constants


def _in_old_opset(
    node: onnx.NodeProto, constants: dict[str, onnx.TensorProto], shapes: Mapping[str, Sequence[int]]
) -> list[onnx.NodeProto]:
    """Return nodes in opset 17, and add the constants that they need."""
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute if a.name != "noop_with_empty_axes"}
    inputs = list(node.input)
    if node.op_type == "Gelu":
        return _gelu(inputs[0], node.output[0], _GELU[attributes.get("approximate", b"none")], constants)
    if node.op_type == "Split":  # which no converter lowers
        axis, count = attributes["axis"], len(node.output)
        explicit = numpy_helper.to_array(constants[inputs[1]]) if len(inputs) > 1 else None
        sizes = [shapes[inputs[0]][axis] // count] * count if explicit is None else explicit
        cuts = np.cumsum([0, *sizes]).tolist()
        between = [[_constant(np.array([value]), constants) for value in (*pair, axis)] for pair in pairwise(cuts)]
        return [
            helper.make_node("Slice", [inputs[0], *where], [output])
            for where, output in zip(between, node.output, strict=True)
        ]
    if node.op_type.startswith("Reduce") and node.op_type != "ReduceSum" and len(inputs) > 1:
        attributes["axes"] = numpy_helper.to_array(constants[inputs.pop()]).tolist()
    return [helper.make_node(node.op_type, inputs, list(node.output), domain=node.domain, **attributes)]


def _constant(value: np.ndarray, constants: dict[str, onnx.TensorProto]) -> str:
    """Add a constant, and return its name."""
    name = f"constant {value.dtype} {value.tolist()}"
    constants[name] = numpy_helper.from_array(value, name)
    return name


def _gelu(
    x: str, result: str, steps: Sequence[tuple[str | float, ...]], constants: dict[str, onnx.TensorProto]
) -> list[onnx.NodeProto]:
    nodes: list[onnx.NodeProto] = []
    for kind, *operands in steps:
        inputs = [
            _constant(np.array(operand, np.float32), constants)
            if isinstance(operand, float)
            else (x if operand == "x" else nodes[-1].output[0])
            for operand in operands
        ]
        output = f"{result}/{len(nodes)}" if len(nodes) + 1 < len(steps) else result
        nodes.append(helper.make_node(str(kind), inputs, [output]))
    return nodes
