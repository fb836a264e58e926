"""Precisions: the operators in float16 and int8, the tolerances, and quantization that ruins a transformer."""

from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from ls_edge.core.bands import Bands
from ls_edge.core.errors import UsageError, VerificationError
from ls_edge.core.parts import HEAD, STEM
from ls_edge.engines.pipeline import Pipeline
from ls_edge.export.calibration import activation_ranges, read_calibration
from ls_edge.export.fp16 import to_half
from ls_edge.export.int8 import linear_layers, quantize_dynamic, quantize_explicit, quantize_weight
from ls_edge.export.merge import group
from ls_edge.export.targets import PartsView, prepare_for_export
from ls_edge.export.trace_onnx import trace_blocks
from ls_edge.export.verify import RESIDUAL, verify_run
from ls_edge.export.writer import ExportSettings, export_run
from ls_edge.training.runs.checkpoint import load_run

TOKENS = (17, 32)
IMAGES = np.random.default_rng(1).standard_normal((4, 3, 16, 16), dtype=np.float32)


def session_of(raw):
    """Open plain ONNX Runtime without saturation of int8 products, which happens on processors without VNNI."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")
    return onnxruntime.InferenceSession(raw, options)


@pytest.fixture(scope="module")
def traced(loaded):
    return list(trace_blocks(prepare_for_export(loaded.view)))


@pytest.fixture(scope="module")
def calibration(loaded):
    return read_calibration("digits", loaded.record.image, loaded.record.classes, 80)


def run(model, tokens):
    return session_of(model.SerializeToString()).run(None, {"tokens": tokens})[0]


def types_of(model):
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    values = (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output)
    return {v.name: v.type.tensor_type.elem_type for v in values} | {
        t.name: t.data_type for t in inferred.graph.initializer
    }


def test_half_is_for_products_and_float_for_all_that_adds_up(traced):
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


def test_int8_is_for_linear_layers_alone(traced):
    dynamic = quantize_dynamic(traced[0])
    onnx.checker.check_model(dynamic, full_check=True)
    counts = Counter(node.op_type for node in dynamic.graph.node)
    assert (counts["MatMulInteger"], counts["MatMul"], counts["LayerNormalization"], counts["Softmax"]) == (4, 2, 2, 1)
    assert counts["DynamicQuantizeLinear"] == 4
    scales = [t for t in dynamic.graph.initializer if t.name.endswith(".t_scale")]
    assert sorted(t.dims[0] for t in scales) == [32, 32, 64, 96]
    explicit = quantize_explicit(traced[0], {linear.activations: 3.0 for linear in linear_layers(traced[0])})
    onnx.checker.check_model(explicit, full_check=True)
    counts = Counter(node.op_type for node in explicit.graph.node)
    assert (counts["QuantizeLinear"], counts["DequantizeLinear"], counts["MatMul"]) == (4, 8, 6)
    consumers = {name: node.op_type for node in explicit.graph.node for name in node.input}
    assert all(consumers[n.output[0]] == "DequantizeLinear" for n in explicit.graph.node if n.op_type[:2] == "Qu")
    assert all(consumers[n.output[0]] == "MatMul" for n in explicit.graph.node if n.op_type == "DequantizeLinear")


def test_weights_by_channel():
    weight = np.array([[1.0, 1000.0, 0.0], [-0.5, 10.0, 0.0]], np.float32)
    whole, scale = quantize_weight(weight)
    assert whole.dtype == np.int8
    np.testing.assert_array_equal(np.abs(whole).max(axis=0), [127, 127, 0])
    assert (np.abs(whole * scale - weight) <= scale * 0.5001).all()


def test_a_layer_as_gemm(traced):
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


def test_a_gemm_that_is_more_than_a_layer_stays_one(traced):
    value = helper.make_tensor_value_info
    node = helper.make_node("Gemm", ["x", "w"], ["y"], alpha=0.5)
    weight = numpy_helper.from_array(np.eye(8, 5, dtype=np.float32), "w")
    graph = helper.make_graph([node], "g", [value("x", 1, ["batch", 8])], [value("y", 1, ["batch", 5])], [weight])
    model = to_half(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10))
    x = np.random.default_rng(1).standard_normal((3, 8), dtype=np.float32)
    found = session_of(model.SerializeToString()).run(None, {"x": x})[0]
    np.testing.assert_allclose(found, x[:, :5] / 2, rtol=0, atol=5e-3)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_tract_runs_all_parts(make_run, tmp_path, precision):
    """Another engine reads the files; it refuses a float16 ``Gemm`` with a bias."""
    tract = pytest.importorskip("tract", reason="tract is not installed; run with 0.23.9")

    def lean(view):
        view.model.head.bias.normal_(generator=torch.Generator().manual_seed(0))

    bundle = export_run(
        load_run(make_run(tmp_path / "run", change=lean)), tmp_path / "bundle", ExportSettings(precision)
    ).bundle
    with Pipeline.open(bundle, threads=1, provider="cpu") as chain:
        now = IMAGES
        for name, engine in (
            ("stem", chain.executor.engines[STEM]),
            ("block 0", chain.executor.engines[0]),
            ("head", chain.executor.engines[HEAD]),
        ):
            wanted = engine.run({engine.signature.inputs[0].name: now})
            file = str(bundle.folder / bundle.part(name).file)
            found = tract.onnx().load(file).into_model().into_runnable().run([now])[0].to_numpy()
            np.testing.assert_allclose(
                found, wanted, rtol=0, atol=(1e-4 if precision == "fp32" else 2e-2) * wanted.max()
            )
            now = wanted if name == "stem" else now


@pytest.fixture(scope="module")
def gentle(make_run, tmp_path_factory):
    """Return a run with weights of realistic size; large ones amplify every rounding error."""

    def soften(view):
        for block in view.blocks:
            for parameter in block.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(0.6)

    return load_run(make_run(tmp_path_factory.mktemp("gentle") / "run", change=soften))


@pytest.mark.parametrize(
    ("settings", "again"),
    [
        (ExportSettings("fp16", whole=True), False),
        (ExportSettings("int8", whole=True, blocks_per_part=3), False),
        (ExportSettings("int8", "tensorrt", max_batch=3), True),
    ],
    ids=lambda value: f"{value.precision} {value.engine}" if isinstance(value, ExportSettings) else "",
)
def test_export_verify_and_the_same_bytes_again(gentle, calibration, tmp_path, settings, again):
    given = calibration if settings.engine == "tensorrt" else None
    bundle = export_run(gentle, tmp_path / "one", settings, calibration=given).bundle
    manifest = bundle.manifest
    found = manifest.verified
    assert manifest.precision == settings.precision
    assert bundle.num_blocks == 3 // settings.blocks_per_part
    assert found["batches"] == [1, 2, settings.max_batch]
    assert found["measure"] == ("cosine" if settings.precision == "int8" else "relative error")
    assert (found["residual_1500"] is not None) == (settings.precision == "fp16")
    assert (found["top1"] is not None) == (given is not None)
    verify_run(bundle, gentle)
    if again:
        once_more = export_run(gentle, tmp_path / "two", settings, calibration=given).bundle
        assert once_more.manifest.bundle_id == manifest.bundle_id
        assert once_more.manifest.parts == manifest.parts
    if settings.whole:
        with Pipeline.open(bundle, threads=1, provider="cpu") as chain:
            logits = chain.forward(IMAGES)
        whole = session_of(bundle.read("whole")).run(None, {"images": IMAGES})[0]
        np.testing.assert_allclose(whole, logits, rtol=0, atol=1e-2)


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


def massive(view):
    """Give two channels much larger values than the others, as in trained vision transformers."""
    view.model.pos_embed[..., 0] += 1000.0
    view.model.pos_embed[..., 1] -= 1000.0
    for block in view.blocks:
        for norm in (block.norm1, block.norm2):
            norm.weight.fill_(250.0)
            norm.weight[:2] = 0.05
    view.model.norm.weight.fill_(250.0)
    view.model.norm.weight[:2] = 0.05


def test_quantised_residuals_ruin_what_quantised_linear_layers_keep(make_run, tmp_path):
    run_ = load_run(make_run(tmp_path / "run", change=massive))
    view = run_.view
    tokens = view.stem(torch.from_numpy(IMAGES)).detach()
    with torch.no_grad():
        expected = view(torch.from_numpy(IMAGES)).numpy()
    ours = theirs = tokens.numpy()
    for model in trace_blocks(prepare_for_export(view)):
        ours = run(quantize_dynamic(model), ours)
        theirs = run(with_quantised_sums(quantize_dynamic(model)), theirs)
    with torch.no_grad():
        kept, ruined = (view.head(torch.from_numpy(t)).numpy() for t in (ours, theirs))
    assert cosine(kept, expected) >= 0.999
    assert cosine(ruined, expected) < 0.9


def with_quantised_sums(model):
    """Quantize each residual sum too, with one scale per tensor, as tools do by default."""
    constants = {t.name for t in model.graph.initializer}
    nodes = []
    for node in model.graph.node:
        if node.op_type != "Add" or set(node.input) & constants:
            nodes.append(node)
            continue
        name = node.output[0]
        node.output[0] = f"{name}_sum"
        pair = [f"{name}_q", f"{name}_s", f"{name}_z"]
        nodes += [
            node,
            helper.make_node("DynamicQuantizeLinear", [node.output[0]], pair),
            helper.make_node("DequantizeLinear", pair, [name]),
        ]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.checker.check_model(model, full_check=True)
    return model


def cosine(a, b):
    return float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))


def test_ranges_are_the_largest_that_a_layer_was_given(traced, loaded, calibration):
    with torch.no_grad():
        tokens = loaded.view.stem(torch.from_numpy(calibration.fit.images)).numpy()
    ranges = activation_ranges(traced, tokens, Bands(3))
    assert [len(found) for found in ranges] == [4, 4, 4]
    assert all(value > 0 for found in ranges for value in found.values())
    louder = activation_ranges(traced, tokens * 2, Bands(3))
    assert louder[0].keys() == ranges[0].keys()
    norm = next(name for name in ranges[0] if name.startswith("layernormalization"))
    assert louder[0][norm] == pytest.approx(ranges[0][norm], rel=0.15)
    with pytest.raises(VerificationError, match="calibration found nan"):
        quantize_explicit(traced[0], {})


def test_int8_for_tensorrt_without_calibration_is_refused(loaded, tmp_path):
    with pytest.raises(UsageError, match="--calibrate"):
        export_run(loaded, tmp_path / "bundle", ExportSettings("int8", "tensorrt"))
    assert list(tmp_path.iterdir()) == []


def test_a_precision_that_misses_its_bar_is_refused_and_leaves_nothing(make_run, tmp_path):
    def overflow(view):
        view.blocks[2].mlp.fc2.weight.mul_(1e6)

    run_ = load_run(make_run(tmp_path / "run", change=overflow))
    with pytest.raises(VerificationError, match=r"^block 2 "):
        export_run(run_, tmp_path / "bundle", ExportSettings("fp16"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]
