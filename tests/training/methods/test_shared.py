"""The method ``shared``: one set of weights in several places, made from a trained model, in any order."""

import itertools

import msgspec
import numpy as np
import onnxruntime
import pytest
import torch

from ls_edge.core.bands import Bands
from ls_edge.core.bundle import Bundle, Folded
from ls_edge.core.errors import UsageError
from ls_edge.data.datasets import open_data
from ls_edge.data.preprocess import Preprocessor, iterate_batches
from ls_edge.device.sensors import Sensors
from ls_edge.engines.opening import open_block_engines
from ls_edge.engines.pipeline import Pipeline
from ls_edge.engines.profiling import MeasuredDevice, profile_bundle
from ls_edge.evaluation.evaluate import evaluate
from ls_edge.evaluation.orders import EvaluationOrders
from ls_edge.evaluation.settings import EvaluationSettings
from ls_edge.export.targets import prepare_for_export
from ls_edge.export.trace_onnx import trace_blocks
from ls_edge.training.config import read_config
from ls_edge.training.loop import train
from ls_edge.training.methods.base import soft_cross_entropy
from ls_edge.training.methods.registry import make_method
from ls_edge.training.methods.step_plan import StepPlan
from ls_edge.training.models.slots import SlotEmbedding
from ls_edge.training.models.small_models import build
from ls_edge.training.models.torch_blocks import TorchBlocks
from ls_edge.training.runs.checkpoint import load_run, read_tensors
from tests.training.trainings import Silent, Stops, criterion, set_tables

torch.set_num_threads(1)
TINY = {"embed_dim": 16, "depth": 6, "num_heads": 2, "mlp_ratio": 2.0}
IMAGES = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))
TARGETS = torch.arange(6)


def made(bands="0/1-4/5", settings=None, model=TINY):
    """Return a method, the view with its shared blocks, and the original view."""
    torch.manual_seed(0)
    view = build("vit_digits", model).eval()
    if "init_values" in model:  # as different norms and scales of branches as in a pretrained model
        with torch.no_grad():
            for name, value in view.model.named_parameters():
                if ".norm" in name or ".ls" in name or "bias" in name:
                    value.add_(torch.rand_like(value))
    before = build("vit_digits", model).eval()
    before.load_weights(view.weights())
    method = make_method("shared", {"start": "middle", "adapter_rank": 0, **(settings or {})})
    places = method.reshape(view, Bands.from_json(bands, 6), None, trained=True)
    method.attach(view)
    return method, view, before, places


def assert_file_computes(graph, view, slots, slots_of_view):
    """Compare a block's file with the view's block, with a different slot for each image."""
    session = onnxruntime.InferenceSession(graph.SerializeToString())
    tokens = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(2))
    [found] = session.run(None, {"tokens": tokens.numpy(), "slot": np.array(slots)})
    with torch.no_grad():
        wanted = view.block(1, tokens, torch.tensor(slots_of_view)).numpy()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_the_largest_band_has_one_set_of_weights_and_a_row_for_each_slot():
    _, view, before, places = made()
    assert list(places) == [0, 3, 3, 3, 3, 5]
    assert view.owners == (0, 1, 1, 1, 1, 5)
    assert view.shares_weights
    assert [table.shape for table in view.slots.tables] == [(6, 2, 3, 16)]
    names = [name for name in view.weights() if name.startswith("blocks.")]
    assert {name.split(".")[1] for name in names} == {"0", "1", "5"}
    with torch.no_grad():
        tokens = view.stem(IMAGES)
        assert torch.equal(view.block(2, tokens, 2), before.block(3, tokens))
        assert torch.equal(view.block(5, tokens, 5), before.block(5, tokens))
    assert sum(p.numel() for p in view.model.parameters()) < sum(p.numel() for p in before.model.parameters())
    one = made(bands=None)[1]
    assert one.owners == (0,) * 6


def test_every_order_within_the_bands_gives_the_same_logits():
    _, view, _, _ = made()
    set_tables(view)
    with torch.no_grad():
        wanted = view(IMAGES)
        for middle in itertools.permutations(range(1, 5)):
            assert torch.equal(view(IMAGES, [0, *middle, 5]), wanted)
        tokens = view.stem(IMAGES)
        assert torch.equal(view.block(1, tokens, 2), view.block(4, tokens, 2))
        assert not torch.equal(view.block(1, tokens, 1), view.block(1, tokens, 2))
        view.slots = SlotEmbedding(6, 16).eval()  # of a run that method position trained from there
        assert torch.equal(view.block(1, tokens, 2), view.block(4, tokens, 2))


@pytest.mark.parametrize("start", ["middle", "mean"])
def test_adapters_of_full_rank_make_each_slot_the_block_of_the_teacher(start):
    scaled = {**TINY, "init_values": 0.1}
    method, view, before, _ = made(None, {"adapter_rank": 16, "start": start}, scaled)
    method.prepare(view, IMAGES)
    with torch.no_grad():
        found, wanted = view(IMAGES), before(IMAGES)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3 * wanted.abs().max())
    assert view.blocks[0].attn.qkv.weight is view.blocks[5].attn.qkv.weight


def test_adapters_of_a_low_rank_come_closer_to_the_teacher_and_leave_the_order_free():
    errors = []
    for rank in (1, 4, 12):
        method, view, before, _ = made(settings={"adapter_rank": rank})
        method.prepare(view, IMAGES)
        with torch.no_grad():
            tokens = view.stem(IMAGES)
            errors.append(float((view.block(1, tokens, 1) - before.block(1, tokens)).square().mean()))
            wanted = view(IMAGES)
            for middle in ([2, 1, 4, 3], [4, 3, 2, 1]):
                assert torch.equal(view(IMAGES, [0, *middle, 5]), wanted)
            slots = torch.tensor([1, 2, 3, 4, 1, 2])
            one_by_one = [view.block(2, tokens[i : i + 1], int(slot)) for i, slot in enumerate(slots)]
            torch.testing.assert_close(view.block(2, tokens, slots), torch.cat(one_by_one))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.5 * errors[0]


def test_adapters_learn_and_travel_with_the_weights():
    method, view, _, _ = made(settings={"adapter_rank": 4})
    method.prepare(view, IMAGES)
    names = [name for name in view.weights() if "adapters" in name]
    assert len(names) == 12
    method.loss(view, IMAGES, TARGETS, method.draw(Bands(6), 0, 0), criterion).backward()
    for table in view.slots.adapters[0].tables():
        assert table.grad[1:5].abs().amax(dim=(1, 2)).gt(0).all()
        assert not table.grad[[0, 5]].any()
    twin = made(settings={"adapter_rank": 4})[1]
    with torch.no_grad():
        for table in view.slots.adapters[0].tables():
            table += 0.1
        twin.load_weights(view.weights())
        assert torch.equal(twin(IMAGES), view(IMAGES))


def test_the_loss_is_labels_answers_and_tokens_of_the_teacher():
    method, view, before, _ = made(settings={"tokens": 0.7, "logits": 0.4, "temperature": 3.0, "exits": 0.0})
    set_tables(view)
    assert method.teacher is not None
    plan = method.draw(Bands(6), 0, 0)
    assert plan == StepPlan.plain(range(6))
    found = method.loss(view, IMAGES, TARGETS, plan, criterion)
    with torch.no_grad():
        ours, theirs, errors = view.stem(IMAGES), before.stem(IMAGES), []
        for index in range(6):
            ours, theirs = view.block(index, ours, index), before.block(index, theirs)
            errors.append((((ours - theirs) ** 2).mean((1, 2)) / (theirs**2).mean((1, 2))).mean())
        logits, wanted = view.head(ours), before.head(theirs)
        expected = 0.6 * criterion(logits, TARGETS) + 0.4 * soft_cross_entropy(logits, wanted, 3.0)
    torch.testing.assert_close(found, expected + 0.7 * torch.stack(errors).mean())
    found.backward()
    assert view.slots.tables[0].grad[1:5].abs().amin(dim=(1, 2, 3)).gt(0).all()
    assert not view.slots.tables[0].grad[[0, 5]].any()
    assert view.blocks[2].attn.qkv.weight.grad is view.blocks[3].attn.qkv.weight.grad


def test_some_steps_stop_early_and_learn_the_last_answer_of_the_teacher():
    method, view, before, _ = made(settings={"exits": 0.5, "logits": 1.0, "tokens": 0.0})
    plans = [method.draw(Bands(6), 0, step) for step in range(400)]
    assert plans == [method.draw(Bands(6), 0, step) for step in range(400)]
    lengths = [len(plan.groups[0].order) for plan in plans]
    assert set(lengths) == {5, 6}
    assert 160 <= lengths.count(5) <= 240
    with torch.no_grad():
        found = method.loss(view, IMAGES, TARGETS, StepPlan.plain(range(5)), criterion)
        wanted = soft_cross_entropy(view(IMAGES, range(5)), before(IMAGES), 2.0)
    torch.testing.assert_close(found, wanted)


def test_models_that_cannot_share_are_refused():
    view = build("vit_digits", TINY)
    with pytest.raises(UsageError, match="method shared needs a trained start"):
        make_method("shared", {}).reshape(view, Bands(6), None, trained=False)
    with pytest.raises(UsageError, match="needs a band of two blocks or more; the bands are 0/1/2/3/4/5"):
        make_method("shared", {}).reshape(view, Bands.ladder(6)[0], None, trained=True)
    with pytest.raises(UsageError, match=r"logits is 2\.0; it has to be a number from 0 to 1"):
        make_method("shared", {"logits": 2.0})
    with pytest.raises(UsageError, match="adapter_rank is -1; it has to be a whole number from 0"):
        make_method("shared", {"adapter_rank": -1})
    with pytest.raises(UsageError, match="adapter_rank is 17; the linear layers of a block allow at most 16"):
        made(settings={"adapter_rank": 17})


@pytest.mark.release
def test_a_run_has_the_weights_once_and_loads(shared_runs):
    run, start = load_run(shared_runs / "run"), load_run(shared_runs / "start")
    assert run.record.kept == (2, 2, 2, 2)
    assert run.view.needs_slot
    tensors, _ = read_tensors(shared_runs / "run" / "model.safetensors")
    assert {name.split(".")[1] for name in tensors if name.startswith("blocks.")} == {"0"}
    size = {name: (shared_runs / name / "model.safetensors").stat().st_size for name in ("run", "start")}
    assert size["run"] < 0.5 * size["start"]
    images = open_data("digits", "eval")
    refs = images.take(180)
    plan = EvaluationOrders(EvaluationSettings(orders=6, keep=(3,)), Bands(4))
    for model, view in (("start", start), ("run", run)):
        batches = iterate_batches(refs, Preprocessor(view.record.image), 60, print)
        found = evaluate(TorchBlocks(view.view), batches, plan)
        if model == "start":
            assert found.sequential.top1 > 0.6
            lost = found.sequential.top1 - found.arbitrary.top1_mean
            assert lost > 0.1  # what order costs the model that it was made from
            at_least = found.sequential.top1 - 0.15
        else:
            assert found.sequential.top1 >= at_least
            assert found.arbitrary.top1_worst == found.sequential.top1
            assert found.arbitrary.top1_mean == pytest.approx(found.sequential.top1, rel=1e-12)


@pytest.mark.release
def test_a_run_resumes_to_the_same_bits_and_continues_with_labels(shared_runs, tmp_path):
    config, _ = read_config(None, {
        "data": "digits", "method": "shared", "init": str(shared_runs / "start"), "epochs": 2, "threads": 1,
        "device": "cpu", "precision": "fp32", "batch_size": 512,
    })  # fmt: skip
    train(config, tmp_path / "whole", reporter=Silent(), model_named=False)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "broken", reporter=Stops(), model_named=False)
    train(config, tmp_path / "broken", reporter=Silent(), model_named=False, resume=True)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "broken")]
    assert files[0] == files[1]
    further = msgspec.structs.replace(
        config, epochs=0, model=msgspec.structs.replace(config.model, init=str(tmp_path / "whole"))
    )
    reporter = Silent()
    train(further, tmp_path / "further", reporter=reporter, model_named=False)
    assert reporter.warnings == []
    assert (tmp_path / "further" / "model.safetensors").read_bytes() == files[0]


def test_a_bundle_has_one_file_for_all_steps(shared_bundle, shared_runs, tmp_path):
    bundle = Bundle.open(shared_bundle)
    assert sorted(path.name for path in (shared_bundle / "blocks").iterdir()) == ["00.onnx"]
    assert {part.file for part in bundle.manifest.parts.blocks} == {"blocks/00.onnx"}
    assert (bundle.num_blocks, bundle.owners, bundle.shares_weights) == (4, (0, 0, 0, 0), True)
    profile = profile_bundle(bundle, MeasuredDevice("here", Sensors(tmp_path)), duration=0.01, threads=1)
    blocks = [part for part in profile.parts if part.part.startswith("block ")]
    assert [part.file_bytes for part in blocks] == [bundle.part("block 0").bytes, 0, 0, 0]
    engines = open_block_engines(bundle, [1, 2, 3], threads=1)
    assert len(engines) == 3
    assert len({id(engine) for engine in engines.values()}) == 1
    view = load_run(shared_runs / "run").view
    with Pipeline.open(bundle, threads=1) as pipeline, torch.no_grad():
        assert len({id(pipeline.executor.engines[block]) for block in range(pipeline.num_blocks)}) == 1
        wanted = view(IMAGES).numpy()
        first = pipeline.forward(IMAGES.numpy(), [0, 1, 2, 3])
        assert np.abs(first - wanted).max() <= 1e-4 * np.abs(wanted).max()
        for order in ([3, 1, 0, 2], [2, 3, 1, 0]):
            np.testing.assert_array_equal(pipeline.forward(IMAGES.numpy(), order), first)
        assert np.abs(pipeline.forward(IMAGES.numpy(), [0, 1, 2]) - wanted).max() > 1e-3


@pytest.mark.release
@pytest.mark.leaks_ok(reason="torch's exporter starts a monitor thread of tqdm")
def test_ends_ignore_their_slot_and_slots_do_not_count_folded_blocks():
    view = made("0/1-5")[1]
    set_tables(view)
    plain = prepare_for_export(view)
    first = next(trace_blocks(plain)).graph
    assert [value.name for value in first.input] == ["tokens", "slot"]
    assert "slots.tables" not in {tensor.name for tensor in first.initializer}
    graphs = list(trace_blocks(plain, Folded(stem=1, head=0)))
    assert len(graphs) == 5
    assert all(graph is graphs[0] for graph in graphs)
    assert_file_computes(graphs[0], view, [0, 2, 4], [1, 3, 5])
