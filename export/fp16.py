"""Float16 for a traced part: weights and matrix products in half precision, all sums in float32.

The files are strongly typed, as TensorRT 11 requires: ``Cast`` nodes in the graph determine the precision, not flags of
the builder. Matrix products, convolutions, sums of products, and operators that only move, scale, or bias their results
are float16. Tokens at both ends, residual sums, LayerNorm, softmax, LayerScale, and rotary tables are float32, because
residuals of a vision transformer reach thousands, and their squares inside a norm overflow half precision.

On a CPU without half-precision arithmetic, ONNX Runtime computes such a part in float32 between the casts. This is
correct but slower than the float32 file, and it hides values beyond the range of half precision. Therefore,
:func:`beyond_half` looks for such values, and an export keeps the nodes that compute or read them in float32. This
precision is meant for GPUs and for smaller files.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ls_edge.core.bundle import Bundle
from ls_edge.core.parts import HEAD, STEM, part_name
from ls_edge.engines.on_demand import OnDemand
from ls_edge.engines.onnxruntime import open_session
from ls_edge.engines.providers import CPU
from ls_edge.export.canonical import HALF_SCALES, rewritten, to_bytes
from ls_edge.export.int8 import PRODUCTS, linear_layers, tables_of_weights

_FOLLOWERS = (
    "Reshape", "Transpose", "Slice", "Split", "Squeeze", "Unsqueeze", "Gather", "Identity", "Flatten", "Erf", "Relu",
    "QuantizeLinear",
)  # fmt: skip
"""Operators that keep the precision of their first input."""
_INTEGERS = ("Shape", "Size", "QuantizeLinear")
"""Operators with integer results."""


LARGEST = 65_504.0
"""Largest float16 number."""
HALF_IMAGES = 32
"""Maximum number of images on which values are inspected."""
BATCH = 8
"""Number of them that run at the same time, which limits the memory for all values."""


def to_half(model: onnx.ModelProto, wide: Collection[str] = ()) -> onnx.ModelProto:
    """Return the graph with products in float16, including those of Q/DQ pairs; inputs and outputs keep their type.

    Nodes that compute or read a value in ``wide`` (see :func:`beyond_half`) remain in float32.
    """
    return HalfPrecisionRewriter(model, wide).convert()


def nodes_in_float(model: onnx.ModelProto, wide: Collection[str]) -> list[str]:
    """Return the nodes that run in float32 because of ``wide``; products are followed by the name of their weights."""
    usual, kept = HalfPrecisionRewriter(model), HalfPrecisionRewriter(model, wide)
    usual.convert(), kept.convert()
    weights = {linear.node.name: f" ({linear.weight})" for linear in usual.linears.values()}
    return [name + weights.get(name, "") for name in usual.in_half if name not in kept.in_half]


def beyond_half(
    bundle: Bundle, images: np.ndarray, orders: Sequence[Sequence[int]], largest: float = LARGEST
) -> dict[str, list[str]]:
    """Return the names of float16 values that exceed ``largest``, by part; blocks that share a file count as the first.

    Up to :data:`HALF_IMAGES` of ``images`` run through the parts in each order.
    """
    if bundle.manifest.precision != "fp16" and bundle.manifest.opset != HALF_SCALES[0]:
        return {}
    sessions = OnDemand(
        lambda part: _with_halves_as_outputs(bundle.read(part_name(part)), part_name(part)),
        lambda part: 2 * bundle.part(part_name(part)).bytes,  # a CPU computes in float32
    )
    found: dict[str, dict[str, None]] = {}

    def run(part: int, slot: int | None, **inputs: np.ndarray) -> np.ndarray:
        session, names = sessions[part]
        if slot is not None and bundle.manifest.needs_slot:
            inputs["slot"] = np.full(len(inputs["tokens"]), slot, np.int64)
        result, *halves = session.run(None, inputs)
        for name, values in zip(names, halves, strict=True):
            if not float(np.abs(values).max()) <= largest:
                found.setdefault(part_name(part), {})[name] = None
        return np.asarray(result)

    for first in range(0, min(len(images), HALF_IMAGES), BATCH):
        start = run(STEM, None, images=images[first : first + BATCH])
        for order in orders:
            tokens = start
            for slot, index in enumerate(order):
                tokens = run(bundle.owners[index], slot, tokens=tokens)
            run(HEAD, None, tokens=tokens)
    return {part: list(names) for part, names in found.items()}


def _with_halves_as_outputs(raw: bytes, part: str) -> tuple[Any, list[str]]:
    """Return a session with all float16 values as additional outputs, and the names of these values.

    A CPU computes in float32 between the casts; only outputs are rounded, and become infinite beyond the range.
    """
    model = onnx.shape_inference.infer_shapes(onnx.load_model_from_string(raw))
    stored = {tensor.name for tensor in model.graph.initializer}
    # ONNX Runtime cannot return dequantized weights where it rewrites them for processors without VNNI.
    weights = {node.output[0] for node in model.graph.node if stored.issuperset(node.input)}
    halves = [value for value in model.graph.value_info if value.type.tensor_type.elem_type == TensorProto.FLOAT16]
    found = [value for value in halves if value.name not in weights]
    model.graph.output.extend(found)
    return open_session(to_bytes(model, part), part, provider=CPU, threads=1), [value.name for value in found]


class HalfPrecisionRewriter:
    """Rewriter of a graph in one pass, which tracks the precision of every value."""

    def __init__(self, model: onnx.ModelProto, wide: Collection[str] = ()) -> None:
        self.source = model
        self.wide = {name.removesuffix("_as_half").removesuffix("_half") for name in wide}
        self.in_half: dict[str, None] = {}
        """Names of the nodes in float16, in order."""
        self.linears = {linear.node.output[0]: linear for linear in linear_layers(model)}
        self.constants = {t.name: t for t in model.graph.initializer}
        self.tables = set(tables_of_weights(model))
        self.slot_biases = {
            node.output[0]
            for node in model.graph.node
            if node.op_type == "Gather" and self.constants.keys() & node.input == {node.input[0]}
        }
        self.outputs = {value.name for value in model.graph.output}
        self.floats = {v.name for v in model.graph.input if v.type.tensor_type.elem_type == TensorProto.FLOAT}
        self.floats |= {name for name, t in self.constants.items() if t.data_type == TensorProto.FLOAT}
        self.half: set[str] = set()
        self.gates: set[str] = set()
        """Values from 0 to 2, which GELU multiplies its input with."""
        self.cast: set[str] = set()
        self.nodes: list[onnx.NodeProto] = []
        self.kept: dict[str, onnx.TensorProto] = {}

    def convert(self) -> onnx.ModelProto:
        """Return the rewritten graph."""
        for node in [plain for source in self.source.graph.node for plain in self._without_gemm(source)]:
            fresh = onnx.NodeProto()
            fresh.CopyFrom(node)
            in_half = self._runs_in_half(node)
            self._retype(fresh, in_half)
            if in_half:
                self.in_half[node.name] = None
                if node.op_type == "Erf" or (node.op_type == "Add" and not self.gates.isdisjoint(node.input)):
                    self.gates.update(node.output)
                self._append_half(fresh)
            else:
                self.nodes.append(fresh)
                if any(name in self.floats for name in node.input) and node.op_type not in _INTEGERS:
                    self.floats.update(node.output)
        result = rewritten(self.source, self.nodes, self.kept.values())
        if any(node.op_type == "QuantizeLinear" for node in self.nodes):
            result.opset_import[0].version, result.ir_version = HALF_SCALES
        return result

    def _without_gemm(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Split a ``Gemm`` of activations and constants into ``MatMul`` and ``Add``.

        The engine tract rejects a half-precision ``Gemm`` with a bias.
        """
        linear = self.linears.get(node.output[0])
        if node.op_type != "Gemm" or linear is None:
            return [node]
        weight, product = linear.weight, node.output[0]
        if linear.transposed:
            turned = numpy_helper.to_array(self.constants[weight]).T
            weight = f"{weight}.t"
            self.constants[weight] = numpy_helper.from_array(np.ascontiguousarray(turned), weight)
            self.floats.add(weight)
        if not linear.bias:
            return [helper.make_node("MatMul", [linear.activations, weight], [product], name=node.name)]
        between = f"{product}_product"
        return [
            helper.make_node("MatMul", [linear.activations, weight], [between], name=node.name),
            helper.make_node("Add", [between, linear.bias], [product], name=f"{node.name}_bias"),
        ]

    def _runs_in_half(self, node: onnx.NodeProto) -> bool:
        """Return whether a node is a product, or follows one and neither adds activations nor needs a large range."""
        if not self.wide.isdisjoint((*node.input, *node.output)):
            return False
        if node.op_type == "DequantizeLinear":
            return True
        if node.op_type in PRODUCTS:
            return all(name in self.floats for name in node.input if name)
        if node.output[0] in self.tables:
            return True
        halves = [name for name in node.input if name in self.half]
        if not halves:
            return False
        if node.op_type in _FOLLOWERS:
            return node.input[0] in self.half
        names = [name for name in node.input if name not in self.half]
        others = [self.constants.get(name) for name in names]
        if node.op_type == "Add":
            biases = (t is not None and len(t.dims) <= 1 for t in others)
            return self.slot_biases.issuperset(names) or all(biases)
        if node.op_type in ("Mul", "Div"):
            is_gelu = not self.gates.isdisjoint(node.input)
            return is_gelu or (len(halves) == 1 and all(t is not None and np.prod(t.dims) == 1 for t in others))
        return node.op_type == "Concat" and len(halves) == len(node.input)

    def _append_half(self, node: onnx.NodeProto) -> None:
        casts = []
        for place, name in enumerate(node.output if node.op_type not in _INTEGERS else ()):
            self.floats.add(name)
            if name in self.outputs:
                node.output[place] = f"{name}_half"
                casts.append(_cast(node.output[place], name, TensorProto.FLOAT))
            self.half.add(node.output[place])
        self.nodes += [node, *casts]

    def _retype(self, node: onnx.NodeProto, in_half: bool) -> None:
        """Convert the floating-point inputs of ``node`` to one precision."""
        for place, name in enumerate(node.input):
            if name in self.constants:
                node.input[place] = self._constant(name, in_half and name in self.floats)
            elif name in self.floats and (name in self.half) != in_half:
                fresh = node.input[place] = f"{name}_as_{'half' if in_half else 'float'}"
                if fresh not in self.cast:
                    self.cast.add(fresh)
                    self.nodes.append(_cast(name, fresh, TensorProto.FLOAT16 if in_half else TensorProto.FLOAT))

    def _constant(self, name: str, in_half: bool) -> str:
        if not in_half:
            self.kept[name] = self.constants[name]
            return name
        half = f"{name}_half"
        if half not in self.kept:
            with np.errstate(over="ignore"):  # the verification detects infinite values
                array = numpy_helper.to_array(self.constants[name]).astype(np.float16)
            self.kept[half] = numpy_helper.from_array(array, half)
        return half


def _cast(source: str, target: str, kind: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [source], [target], name=f"Cast_{target}", to=kind)
