"""Int8 for a block: its linear layers, and nothing else.

Two forms of one rule. Only products with a constant matrix are quantised, weights symmetric and by output channel;
attention's own products, residual sums, norms and softmax stay in float32, and so do stem and head, which cost
little and decide much. Quantising the residual sums as well, as tools do by default, ruins vision transformers: a few
large tokens stretch the scale and the rest falls to a handful of steps.

- :func:`quantise_dynamic`, for CPUs: activations are scaled at run time, for each tensor (``DynamicQuantizeLinear``
  and ``MatMulInteger``). No calibration. One scale for a whole batch, so an answer depends in its last digits on the
  images that ran beside it.
- :func:`quantise_explicit`, for TensorRT: ``QuantizeLinear`` and ``DequantizeLinear`` around each linear layer with
  scales from :class:`Ranges` of calibration images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ls_edge.core.errors import VerificationError


@dataclass(frozen=True)
class Linear:
    """A product of activations with a constant matrix ``[K, N]``."""

    node: onnx.NodeProto
    activations: str
    weight: str
    transposed: bool
    """Whether the file holds ``[N, K]`` (Gemm)."""
    bias: str | None


def linear_layers(model: onnx.ModelProto) -> list[Linear]:
    """All linear layers of a graph, in order."""
    matrices = {t.name for t in model.graph.initializer if len(t.dims) == 2 and t.data_type == TensorProto.FLOAT}
    found = []
    for node in model.graph.node:
        if node.op_type not in ("MatMul", "Gemm") or node.input[1] not in matrices or node.input[0] in matrices:
            continue
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if attributes.get("alpha", 1.0) != 1.0 or attributes.get("beta", 1.0) != 1.0 or attributes.get("transA", 0):
            continue
        bias = node.input[2] if len(node.input) > 2 else None
        found.append(Linear(node, node.input[0], node.input[1], bool(attributes.get("transB", 0)), bias))
    return found


def quantise_weight(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Float32 ``[K, N]`` to int8 ``[K, N]`` within 127 and float32 scales ``[N]``."""
    scale = np.abs(weight).max(axis=0) / np.float32(127)
    scale = np.where(scale > 0, scale, np.float32(1)).astype(np.float32)
    return np.clip(np.rint(weight / scale), -127, 127).astype(np.int8), scale


def quantise_dynamic(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with its linear layers in int8, activations scaled at run time."""
    return _rewrite(model, _dynamic)


def quantise_explicit(model: onnx.ModelProto, ranges: Mapping[str, float]) -> onnx.ModelProto:
    """The graph with Q/DQ pairs around its linear layers; ``ranges`` is the largest activation of each layer's input.

    Raises :class:`VerificationError` where one is missing or is no number above zero.
    """

    def explicit(builder: GraphBuilder, linear: Linear, weight: np.ndarray, output: str) -> None:
        found = ranges.get(linear.activations, float("nan"))
        if not 0 < found < float("inf"):
            raise VerificationError(
                f"calibration saw {found} as the largest value of {linear.activations!r}; use images that are like "
                "those of the training data"
            )
        _explicit(builder, linear, weight, output, found)

    return _rewrite(model, explicit)


class GraphBuilder:
    """Collects nodes and constants of a graph; what is added twice under one name is there once."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, np.ndarray] = {}
        self._done: set[str] = set()

    def constant(self, name: str, value: np.ndarray) -> str:
        """Add a constant and return its name."""
        self.constants[name] = value
        return name

    def node(self, kind: str, inputs: list[str], outputs: list[str], **attributes: int) -> str:
        """Add a node and return the name of its first output."""
        if outputs[0] not in self._done:
            self._done.add(outputs[0])
            node = helper.make_node(kind, inputs, outputs, name=f"{kind}_{outputs[0]}")
            node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
            self.nodes.append(node)
        return outputs[0]


_Replace = Callable[[GraphBuilder, Linear, np.ndarray, str], None]


def _rewrite(model: onnx.ModelProto, replace: _Replace) -> onnx.ModelProto:
    linears = {linear.node.output[0]: linear for linear in linear_layers(model)}
    weights = {t.name: t for t in model.graph.initializer}
    builder = GraphBuilder()
    for node in model.graph.node:
        linear = linears.get(node.output[0])
        if linear is None:
            builder.nodes.append(node)
            continue
        array = numpy_helper.to_array(weights[linear.weight])
        output = linear.node.output[0] if linear.bias is None else f"{linear.node.output[0]}_product"
        replace(builder, linear, array.T if linear.transposed else array, output)
        if linear.bias is not None:
            builder.node("Add", [output, linear.bias], [linear.node.output[0]])
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.node[:], result.graph.initializer[:]
    result.graph.node.extend(builder.nodes)
    read = {name for node in builder.nodes for name in node.input}
    result.graph.initializer.extend(t for name, t in weights.items() if name in read)
    result.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in builder.constants.items())
    return result


def _dynamic(builder: GraphBuilder, linear: Linear, weight: np.ndarray, output: str) -> None:
    whole, scale = quantise_weight(weight)
    x, w = linear.activations, linear.weight
    builder.node("DynamicQuantizeLinear", [x], [f"{x}_int8", f"{x}_scale", f"{x}_zero"])
    product = builder.node(
        "MatMulInteger", [f"{x}_int8", builder.constant(f"{w}_int8", whole), f"{x}_zero"], [f"{output}_int32"]
    )
    floats = builder.node("Cast", [product], [f"{output}_unscaled"], to=TensorProto.FLOAT)
    both = builder.node("Mul", [f"{x}_scale", builder.constant(f"{w}_scale", scale)], [f"{output}_scale"])
    builder.node("Mul", [floats, both], [output])


def _explicit(builder: GraphBuilder, linear: Linear, weight: np.ndarray, output: str, largest: float) -> None:
    whole, scale = quantise_weight(weight)
    x, w = linear.activations, linear.weight
    step = builder.constant(f"{x}_scale", np.float32(largest / 127))
    zero = builder.constant("zero", np.int8(0))
    builder.node("QuantizeLinear", [x, step, zero], [f"{x}_int8"])
    builder.node("DequantizeLinear", [f"{x}_int8", step, zero], [f"{x}_stepped"])
    builder.node(
        "DequantizeLinear",
        [
            builder.constant(f"{w}_int8", whole), builder.constant(f"{w}_scale", scale),
            builder.constant(f"{w}_zero", np.zeros(len(scale), np.int8)),
        ],
        [f"{w}_stepped"], axis=1,
    )  # fmt: skip
    builder.node("MatMul", [f"{x}_stepped", f"{w}_stepped"], [output])
