"""Float16 for a traced part: weights and matrix products in half precision, all that adds up in float32.

The files are strongly typed, as TensorRT 11 demands: precision is written into the graph as ``Cast`` nodes and
nothing is left to a builder's flags. In float16 are matrix products, convolutions, and what only moves, scales or
biases their results; in float32 the tokens that come and go, residual sums, LayerNorm, softmax, LayerScale and
rotary tables. Residuals of a vision transformer reach thousands, and their squares inside a norm overflow half
precision.

On a CPU without half-precision arithmetic ONNX Runtime computes such a part in float32 between the casts: right,
but slower than the float32 file. The precision is meant for GPUs and for halving the files.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_PRODUCTS = ("MatMul", "Gemm", "Conv")
_MOVES = ("Reshape", "Transpose", "Slice", "Split", "Squeeze", "Unsqueeze", "Gather", "Identity", "Flatten")
_POINTWISE = ("Gelu", "Relu")


def to_half(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph with products in float16; inputs and outputs keep their type."""
    return HalfPrecisionRewriter(model).convert()


class HalfPrecisionRewriter:
    """Rewrites a graph in one pass that tracks of every value whether it is in half precision."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.source = model
        self.constants = {t.name: t for t in model.graph.initializer}
        self.outputs = {value.name for value in model.graph.output}
        self.floats = {v.name for v in model.graph.input if v.type.tensor_type.elem_type == TensorProto.FLOAT}
        self.floats |= {name for name, t in self.constants.items() if t.data_type == TensorProto.FLOAT}
        self.half: set[str] = set()
        self.cast: dict[tuple[str, int], str] = {}
        self.nodes: list[onnx.NodeProto] = []
        self.kept: dict[str, onnx.TensorProto] = {}

    def convert(self) -> onnx.ModelProto:
        """Return the rewritten graph."""
        for node in [plain for source in self.source.graph.node for plain in self._without_gemm(source)]:
            fresh = onnx.NodeProto()
            fresh.CopyFrom(node)
            if self._runs_in_half(node):
                self._retype(fresh, TensorProto.FLOAT16)
                self._append_half(fresh)
            else:
                self._retype(fresh, TensorProto.FLOAT)
                self.nodes.append(fresh)
                if any(name in self.floats for name in node.input) and node.op_type not in ("Shape", "Size"):
                    self.floats.update(node.output)
        result = onnx.ModelProto()
        result.CopyFrom(self.source)
        del result.graph.node[:], result.graph.initializer[:]
        result.graph.node.extend(self.nodes)
        result.graph.initializer.extend(self.kept.values())
        return result

    def _without_gemm(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """A ``Gemm`` of activations and constants as ``MatMul`` and ``Add``; tract refuses it in half with a bias."""
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        scaled = attributes.get("alpha", 1.0) != 1 or attributes.get("beta", 1.0) != 1
        if node.op_type != "Gemm" or scaled or attributes.get("transA", 0) or node.input[1] not in self.constants:
            return [node]
        weight, product = node.input[1], node.output[0]
        if attributes.get("transB", 0):
            turned = numpy_helper.to_array(self.constants[weight]).T
            weight = f"{weight}.t"
            self.constants[weight] = numpy_helper.from_array(np.ascontiguousarray(turned), weight)
            self.floats.add(weight)
        if len(node.input) < 3 or not node.input[2]:
            return [helper.make_node("MatMul", [node.input[0], weight], [product], name=node.name)]
        between = f"{product}_product"
        return [
            helper.make_node("MatMul", [node.input[0], weight], [between], name=node.name),
            helper.make_node("Add", [between, node.input[2]], [product], name=f"{node.name}_bias"),
        ]

    def _runs_in_half(self, node: onnx.NodeProto) -> bool:
        """Products always; what follows one as long as it neither adds activations nor needs range."""
        if node.op_type in _PRODUCTS:
            return all(name in self.floats for name in node.input if name)
        halves = [name for name in node.input if name in self.half]
        if not halves:
            return False
        if node.op_type in (*_MOVES, *_POINTWISE):
            return node.input[0] in self.half
        others = [self.constants.get(name) for name in node.input if name not in self.half]
        if node.op_type == "Add":
            return len(halves) == 1 and all(t is not None and len(t.dims) <= 1 for t in others)
        if node.op_type in ("Mul", "Div"):
            return len(halves) == 1 and all(t is not None and np.prod(t.dims) == 1 for t in others)
        return node.op_type == "Concat" and len(halves) == len(node.input)

    def _append_half(self, node: onnx.NodeProto) -> None:
        for place, name in enumerate(node.output):
            self.floats.add(name)
            if name in self.outputs:
                node.output[place] = f"{name}_half"
                self.half.add(node.output[place])
        self.nodes.append(node)
        for name in list(node.output):
            self.half.add(name)
            public = name.removesuffix("_half")
            if public in self.outputs and public != name:
                self.nodes.append(_cast(name, public, TensorProto.FLOAT))

    def _retype(self, node: onnx.NodeProto, kind: int) -> None:
        """Give ``node`` its floating-point inputs as ``kind``."""
        for place, name in enumerate(node.input):
            if name in self.constants:
                node.input[place] = self._constant(name, kind if name in self.floats else None)
            elif name in self.floats and (name in self.half) != (kind == TensorProto.FLOAT16):
                node.input[place] = self._value(name, kind)

    def _constant(self, name: str, kind: int | None) -> str:
        tensor = self.constants[name]
        if kind == TensorProto.FLOAT16:
            half = f"{name}_half"
            if half not in self.kept:
                array = numpy_helper.to_array(tensor)
                with np.errstate(over="ignore"):  # an infinity is for the verification to find
                    self.kept[half] = numpy_helper.from_array(array.astype(np.float16), half)
            return half
        self.kept[name] = tensor
        return name

    def _value(self, name: str, kind: int) -> str:
        if (name, kind) not in self.cast:
            suffix = "half" if kind == TensorProto.FLOAT16 else "float"
            fresh = self.cast[name, kind] = f"{name}_as_{suffix}"
            self.nodes.append(_cast(name, fresh, kind))
        return self.cast[name, kind]


def _cast(source: str, target: str, kind: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [source], [target], name=f"Cast_{target}", to=kind)
