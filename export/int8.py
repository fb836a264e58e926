"""Int8 for the linear layers of a block.

Only products with a constant matrix are quantized, with symmetric weights per output channel. Attention's own products,
residual sums, norms, and softmax remain in float32, and so do stem and head, which are cheap but sensitive. Quantizing
the residual sums as well, the default of most tools, ruins vision transformers: a few large tokens stretch the scale,
which leaves only a few steps for all others. There are two forms:

- :func:`quantize_dynamic`, for CPUs: activations are scaled at run time, per tensor (``DynamicQuantizeLinear`` and
  ``MatMulInteger``), without calibration. A batch has a single scale, so the last digits of an answer depend on the
  other images in its batch. Low-rank matrices by slot are stored in int8 and multiplied in float32.
- :func:`quantize_explicit`, for TensorRT: ``QuantizeLinear`` and ``DequantizeLinear`` around each linear layer, with
  scales from calibration images. Attention's products then run in float16 (:func:`ls_edge.export.fp16.to_half`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ls_edge.core.errors import VerificationError
from ls_edge.export.canonical import rewritten

PRODUCTS = ("MatMul", "Gemm", "Conv")
LEAST_SCALE = 2.0**-25
"""Largest number that float16 rounds to zero; TensorRT refuses scales of zero."""
_MOVERS = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Slice", "Identity")


@dataclass(frozen=True)
class Linear:
    """A product of activations with a constant matrix ``[K, N]``."""

    node: onnx.NodeProto
    activations: str
    weight: str
    transposed: bool
    """Whether the file contains the matrix as ``[N, K]`` (Gemm)."""
    bias: str | None


def linear_layers(model: onnx.ModelProto) -> list[Linear]:
    """Return all linear layers of a graph in order."""
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


def tables_of_weights(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    """Return the ``Gather`` nodes, by output, that select constant matrices for products only (slot adapters)."""
    tables = {t.name for t in model.graph.initializer if len(t.dims) == 3 and t.data_type == TensorProto.FLOAT}
    summed = {value.name for value in model.graph.output}
    for node in reversed(model.graph.node):
        moved = node.op_type in _MOVERS and node.output[0] not in summed
        summed.update(node.input[1:] if moved else [] if node.op_type in PRODUCTS else node.input)
    found = [node for node in model.graph.node if node.op_type == "Gather" and node.input[0] in tables]
    return {node.output[0]: node for node in found if node.output[0] not in summed}


def quantize_weight(weight: np.ndarray, least: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Return a matrix float32 ``[K, N]`` as int8 ``[K, N]`` within ±127, and its scales, float32 ``[N]``.

    A channel whose scale would be ``least`` or below becomes zero.
    """
    scale = np.abs(weight).max(axis=0) / np.float32(127)
    scale = np.where(scale > least, scale, np.float32(1)).astype(np.float32)
    return np.clip(np.rint(weight / scale), -127, 127).astype(np.int8), scale


class GraphBuilder:
    """Collector of nodes and constants; a node with the output of an earlier one is not added again."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, np.ndarray] = {}
        self._done: set[str] = set()

    def constant(self, name: str, value: np.ndarray) -> str:
        """Add a constant and return its name."""
        self.constants[name] = value
        return name

    def node(self, kind: str, inputs: list[str], outputs: list[str], **attributes: Any) -> str:
        """Add a node and return the name of its first output."""
        if outputs[0] not in self._done:
            self._done.add(outputs[0])
            self.nodes.append(helper.make_node(kind, inputs, outputs, name=f"{kind}_{outputs[0]}", **attributes))
        return outputs[0]


def quantize_dynamic(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the graph with linear layers in int8 and activations that are scaled at run time."""

    def replace(builder: GraphBuilder, linear: Linear, weight: np.ndarray, output: str) -> None:
        whole, scale = quantize_weight(weight)
        x, w = linear.activations, linear.weight
        builder.node("DynamicQuantizeLinear", [x], [f"{x}_int8", f"{x}_scale", f"{x}_zero"])
        product = builder.node(
            "MatMulInteger", [f"{x}_int8", builder.constant(f"{w}_int8", whole), f"{x}_zero"], [f"{output}_int32"]
        )
        floats = builder.node("Cast", [product], [f"{output}_unscaled"], to=TensorProto.FLOAT)
        both = builder.node("Mul", [f"{x}_scale", builder.constant(f"{w}_scale", scale)], [f"{output}_scale"])
        builder.node("Mul", [floats, both], [output])

    return _store_tables(_rewrite(model, replace))


def _store_tables(model: onnx.ModelProto) -> onnx.ModelProto:
    """Store the matrices of slots in int8, with a scale for each row; their small products run in float32."""
    tables = tables_of_weights(model)
    weights = {t.name: t for t in model.graph.initializer}
    builder = GraphBuilder()
    for node in model.graph.node:
        if node.output[0] not in tables:
            builder.nodes.append(node)
            continue
        (name, slot), result = node.input, node.output[0]
        array = numpy_helper.to_array(weights[name])
        whole, scale = quantize_weight(array.reshape(-1, array.shape[-1]).T)
        rows = builder.constant(f"{name}_int8", whole.T.reshape(array.shape))
        scales = builder.constant(f"{name}_scale", scale.reshape(*array.shape[:-1], 1))
        builder.node("Gather", [rows, slot], [f"{result}_int8"], axis=0)
        builder.node("Gather", [scales, slot], [f"{result}_scale"], axis=0)
        floats = builder.node("Cast", [f"{result}_int8"], [f"{result}_unscaled"], to=TensorProto.FLOAT)
        builder.node("Mul", [floats, f"{result}_scale"], [result])
    return _with(model, builder)


def quantize_explicit(model: onnx.ModelProto, ranges: Mapping[str, float]) -> onnx.ModelProto:
    """Return the graph with Q/DQ pairs around its linear layers; ``ranges`` has the largest magnitude of each input.

    Raise :class:`VerificationError` if one is missing, infinite, or not above zero.
    """

    def replace(builder: GraphBuilder, linear: Linear, weight: np.ndarray, output: str) -> None:
        x, w = linear.activations, linear.weight
        largest = ranges.get(x, float("nan"))
        if not 0 < largest < float("inf"):
            raise VerificationError(
                f"calibration found {largest} as the largest value of {x!r}; use images similar to the training data"
            )
        whole, scale = quantize_weight(weight, LEAST_SCALE)
        step = builder.constant(f"{x}_scale", np.float32(largest / 127))
        zero = builder.constant("zero", np.int8(0))
        builder.node("QuantizeLinear", [x, step, zero], [f"{x}_int8"])
        builder.node("DequantizeLinear", [f"{x}_int8", step, zero], [f"{x}_stepped"])
        constants = [
            builder.constant(f"{w}_int8", whole),
            builder.constant(f"{w}_scale", scale),
            builder.constant(f"{w}_zero", np.zeros(len(scale), np.int8)),
        ]
        builder.node("DequantizeLinear", constants, [f"{w}_stepped"], axis=1)
        builder.node("MatMul", [f"{x}_stepped", f"{w}_stepped"], [output])

    return _rewrite(model, replace)


def _rewrite(
    model: onnx.ModelProto, replace: Callable[[GraphBuilder, Linear, np.ndarray, str], None]
) -> onnx.ModelProto:
    linears = {linear.node.output[0]: linear for linear in linear_layers(model)}
    weights = {t.name: t for t in model.graph.initializer}
    builder = GraphBuilder()
    for node in model.graph.node:
        result = node.output[0]
        linear = linears.get(result)
        if linear is None:
            builder.nodes.append(node)
            continue
        array = numpy_helper.to_array(weights[linear.weight])
        output = result if linear.bias is None else f"{result}_product"
        replace(builder, linear, array.T if linear.transposed else array, output)
        if linear.bias is not None:
            builder.node("Add", [output, linear.bias], [result])
    return _with(model, builder)


def _with(model: onnx.ModelProto, builder: GraphBuilder) -> onnx.ModelProto:
    """Return ``model`` with the builder's nodes, its constants, and the initializers that they still read."""
    read = {name for node in builder.nodes for name in node.input}
    kept = [t for t in model.graph.initializer if t.name in read]
    added = [numpy_helper.from_array(value, name) for name, value in builder.constants.items()]
    return rewritten(model, builder.nodes, [*kept, *added])
