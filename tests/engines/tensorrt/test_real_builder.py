"""Parts built by TensorRT for RTX, which needs no GPU: kernels, their types, and the reasons of what it refuses.

TensorRT describes the kernels of an engine in its log. A block has a fused kernel for its attention in half precision.
"""

import logging
import re
import signal
import subprocess
import sys

import pytest
from onnx import TensorProto, helper

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import EngineError
from ls_edge.core.parts import part_name
from ls_edge.engines.tensorrt import build as builder
from ls_edge.engines.tensorrt.build import EngineOptions, build, build_part, build_target, key_of
from ls_edge.engines.tensorrt.cache import TensorRTDevice
from ls_edge.engines.tensorrt.engine import described
from ls_edge.export.canonical import to_bytes
from ls_edge.export.fp16 import to_half
from ls_edge.export.int8 import linear_layers, quantize_explicit

rtx = pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT for RTX is not installed; run with the extra dev")

KEY = key_of("", TensorRTDevice("10.3", "", "", 0), EngineOptions())
"""Two profiles, as on boards: for one image and for two to eight."""
MODELS = {
    "vit_tiny_patch16_224": ({"depth": 1}, {"fp32": (15, 17), "fp16": (8, 10), "int8": (11, 12)}),
    "deit3_small_patch16_224": ({"depth": 1}, {"fp32": (16, 21), "fp16": (8, 10), "int8": (11, 12)}),
    "vit_small_patch14_dinov2": ({"depth": 1, "img_size": 224}, {"fp32": (16, 21), "fp16": (8, 10), "int8": (11, 12)}),
    "beit_base_patch16_224": (
        {"depth": 1, "embed_dim": 192, "num_heads": 3}, {"fp32": (17, 19), "fp16": (9, 11), "int8": (12, 13)},
    ),
    "eva02_tiny_patch14_224": ({"depth": 1}, {"fp32": (16, 17), "fp16": (9, 11), "int8": (11, 12)}),
}  # fmt: skip
"""Kernels of a block for one image and for batches, by precision."""


@pytest.fixture
def log(monkeypatch):
    """Use the real builder; return what it logs, in which each line has its severity."""
    said = []

    class Logger(rtx.ILogger):
        first = ""

        def __init__(self):
            rtx.ILogger.__init__(self)

        def log(self, severity, msg):
            said.append((severity.name, msg))
            if "ERROR" in severity.name:
                self.first = self.first or msg.splitlines()[0]

        def take(self):
            first, self.first = self.first, ""
            return first

    logger = Logger()
    monkeypatch.setattr(builder, "tensorrt_module", lambda: rtx)
    monkeypatch.setattr(builder, "tensorrt_logger", lambda _: logger)
    return said


def kernels(said):
    """Names and types of the kernels of each profile."""
    found = ([], [])
    for line in described("\n".join(text for _, text in said)).splitlines():
        name, _, types = re.fullmatch(r"(.*): (\w+), (.*)", line).groups()
        found["_myl1_" in name].append((name, set(types.split("/"))))
    return found


def block_of(name, arguments, precision):
    from ls_edge.export.targets import prepare_for_export
    from ls_edge.export.trace_onnx import trace_blocks
    from ls_edge.training.models.small_models import create
    from ls_edge.training.models.view import BlockView

    model = next(trace_blocks(prepare_for_export(BlockView(create(name, **arguments)))))
    if precision == "int8":
        model = quantize_explicit(model, {linear.activations: 4.0 for linear in linear_layers(model)})
    return model if precision == "fp32" else to_half(model)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_a_block_has_few_kernels_in_its_own_types(log, name, precision):
    arguments, most = MODELS[name]
    build(to_bytes(block_of(name, arguments, precision), name), "block 0", KEY, b"")
    assert [text for severity, text in log if "ERROR" in severity] == []
    for found, limit in zip(kernels(log), most[precision], strict=True):
        assert 0 < len(found) <= limit
        products = [types for kernel, types in found if kernel.startswith("MatMul_matmul_")]
        if precision != "fp32":
            assert sum("_gemm_mha_v2" in kernel for kernel, _ in found) == 1
        if precision == "int8":
            assert len(products) == 4
            assert all("Int8" in types for types in products)


def test_sums_of_products_and_biases_of_slots_are_half(log):
    from ls_edge.export.targets import prepare_for_export
    from ls_edge.export.trace_onnx import trace_blocks
    from ls_edge.training.methods.registry import make_method
    from ls_edge.training.models.small_models import create
    from ls_edge.training.models.view import BlockView

    view = BlockView(create("vit_tiny_patch16_224", depth=4))
    view.keep_blocks([1] * 4)
    make_method("shared", {}).attach(view)
    build(to_bytes(to_half(next(trace_blocks(prepare_for_export(view)))), "block 1"), "block 1", KEY, b"")
    one, batch = ([types for _, types in found if types != {""}] for found in kernels(log))
    assert (len(one), len(batch)) <= (16, 21)
    products = {frozenset(types) for name, types in kernels(log)[0] if name.startswith("__myl_FcAdd")}
    assert products == {frozenset({"Half"}), frozenset({"Half", "Float"})}  # the last one adds to the tokens
    assert sum("Float" in types for name, types in kernels(log)[0] if name.startswith("__myl_")) <= 4


@pytest.mark.unit
def test_all_parts_of_a_bundle_are_built_without_a_gpu(log, tiny_bundle, tmp_path, monkeypatch):
    monkeypatch.setenv("LS_EDGE_CACHE", str(tmp_path))
    bundle = Bundle.open(tiny_bundle)
    for part in ("stem", part_name(0), "head"):
        first, again = (build_part(bundle, part, EngineOptions.of()) for _ in range(2))
        assert (first.built, again.built, first.plan == again.plan) == (True, False, True)
        assert (first.key.gpu, first.key.profiles) == ("any RTX GPU", ((1, 1, 8),))
    assert str(build_target()).startswith("TensorRT RTX 1.")
    assert [text for severity, text in log if "ERROR" in severity] == []


def graph_of(*nodes):
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "g", [value("x", TensorProto.FLOAT, ["batch", 4])], [value("y", TensorProto.FLOAT, ["batch", 4])]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


CAST = helper.make_node("Cast", ["x"], ["h"], to=TensorProto.FLOAT16)
QUANTIZE = helper.make_node("DynamicQuantizeLinear", ["x"], ["a", "s", "z"], name="Quantize_0")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"garbage", r"cannot read the file \(.*Failed to parse the ONNX model"),
        (graph_of(CAST, helper.make_node("Add", ["x", "h"], ["y"], name="Add_2")),
         r"cannot read the file \(Add Add_2: .*types Float and Half"),
        (graph_of(QUANTIZE, helper.make_node("Cast", ["a"], ["y"], to=TensorProto.FLOAT)),
         r"cannot read the file \(DynamicQuantizeLinear Quantize_0: .*int8 for TensorRT is exported with"),
        (b"", r"could not build an engine for .* \(\S"),
    ],
)  # fmt: skip
def test_the_error_names_the_node_and_the_cause(log, raw, words):
    with pytest.raises(EngineError, match=words) as caught:
        build(raw, "block 0", KEY, b"")
    assert str(caught.value).count("\n") == 0


def test_each_failed_build_has_a_reason_of_its_own(monkeypatch):
    monkeypatch.setattr(builder, "tensorrt_module", lambda: rtx)
    for raw, words in ((b"", "at least one output"), (b"garbage", "Failed to parse"), (b"", "at least one output")):
        with pytest.raises(EngineError, match=words):
            build(raw, "block 0", KEY, b"")


def cancel(_text):
    raise KeyboardInterrupt


@pytest.mark.parametrize("report", [cancel, lambda _: signal.raise_signal(signal.SIGINT)], ids=["callback", "Ctrl-C"])
def test_a_canceled_build_ends_with_the_error_of_its_progress(log, monkeypatch, caplog, report):
    """TensorRT drops exceptions of its callbacks, and 'auto' would then continue on the CPU."""
    monkeypatch.setattr(builder, "PROGRESS_EVERY_S", 0.0)
    before = signal.getsignal(signal.SIGINT)
    with caplog.at_level(logging.INFO, "ls_edge.engines"), pytest.raises(KeyboardInterrupt):
        build(graph_of(helper.make_node("Add", ["x", "x"], ["y"])), "block 0", KEY, b"", report)
    assert caplog.records == []
    assert signal.getsignal(signal.SIGINT) is before


def answers(trt):
    """Results of odd calls, and whether the first logger gets an error."""
    errors = []

    class Logger(trt.ILogger):
        def __init__(self, kept):
            trt.ILogger.__init__(self)
            self.kept = kept

        def log(self, severity, msg):
            self.kept.extend([msg] if "ERROR" in severity.name else [])

    class Monitor(trt.IProgressMonitor):
        def __init__(self):
            trt.IProgressMonitor.__init__(self)

        phase_start = phase_finish = step_complete = lambda *_: True

    raw = graph_of(helper.make_node("Add", ["x", "x"], ["y"]))
    logger, found = Logger(errors), {}
    builder, other = trt.Builder(logger), trt.Builder(logger)

    def note(what, call):
        errors.clear()
        found[what] = call(), bool(errors)

    def parsed(*files):
        network = other.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, logger)
        return network, [parser.parse(file) for file in files], parser.num_errors, network.num_inputs

    def built(network, *shapes):
        config, profile = builder.create_builder_config(), builder.create_optimization_profile()
        config.progress_monitor = Monitor()
        profile.set_shape("x", *shapes)
        number = config.add_optimization_profile(profile) if shapes else None
        return number, builder.build_serialized_network(network, config)

    for what, files in {"nothing": [b""], "garbage": [b"garbage"], "a second file": [raw, raw]}.items():
        note(what, lambda files=files: parsed(*files)[1:])
    network = parsed(raw)[0]
    note("no such input", lambda: network.get_input(5))
    note("descending shapes", lambda: built(network, (8, 4), (4, 4), (1, 4)))
    note("another size", lambda: built(network, (1, 5), (1, 5), (1, 5)))
    note("an empty network", lambda: built(parsed()[0], (1, 4), (1, 4), (1, 4)))
    note("a second logger", lambda: trt.Builder(Logger([])).create_network(0).get_input(5))
    note("a damaged engine", lambda: trt.Runtime(logger).deserialize_cuda_engine(b"damaged" * 999))
    cache = builder.create_builder_config().create_timing_cache(b"damaged")
    return found, cache is not None


def test_the_double_answers_as_the_real_library_does(doubles, gpu):
    assert answers(doubles) == answers(rtx)


def test_a_runtime_without_cuda_is_an_error_and_no_crash():
    """Where CUDA does not start, TensorRT returns an object that crashes at its first use and at its end."""
    pytest.importorskip("tensorrt_lean_bindings", reason="TensorRT's lean runtime is not installed; use the extra dev")
    code = (
        "import tensorrt_lean_bindings as trt\n"
        "from ls_edge.engines.tensorrt.build import tensorrt_runtime\n"
        "tensorrt_runtime(trt)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    if done.returncode == 0:
        pytest.skip("CUDA starts here")
    assert done.returncode == 1
    assert "does not start (createInferRuntime" in done.stderr.splitlines()[-1]
