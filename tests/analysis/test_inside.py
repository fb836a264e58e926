"""Weights, attention and gradients of runs of all families, against plain computations."""

import base64
import io

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from ls_edge.analysis import KINDS, analyze
from ls_edge.analysis.inside import excite, inversion
from ls_edge.analysis.inside.saliency import saliency_map
from ls_edge.analysis.plan import AnalysisPlan, AnalysisSettings
from ls_edge.core.bands import Bands
from ls_edge.training.inspection.gradients import run_blocks
from ls_edge.training.inspection.inspected import Inspected
from ls_edge.training.models.small_models import build, image_spec_of
from ls_edge.training.models.torch_blocks import TorchBlocks
from ls_edge.training.models.view import BlockView

RUN_KINDS = tuple(name for name, kind in KINDS.items() if kind.needs_run)
VIT = {"depth": 3, "embed_dim": 32}
CAIT = {"img_size": 32, "embed_dim": 24, "num_heads": 3, "depth": 2, "patch_size": 8, "num_classes": 3}
MIXER = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "num_classes": 3, "num_blocks": 2}

FAMILIES = [
    ("vit_digits", VIT, {"class_attention", "mixing"}),
    ("vit_cifar", {"depth": 2}, {"class_attention", "mixing", "filters", "layer_scale"}),
    ("cait_xxs24_224", {k: v for k, v in CAIT.items() if k != "patch_size"}, {"attention", "rollout", "mixing"}),
    ("mixer_cifar", MIXER, {"attention", "rollout", "class_attention", "positions", "layer_scale"}),
    ("resmlp", MIXER, {"attention", "rollout", "class_attention", "positions"}),
    ("gmlp", MIXER, {"attention", "rollout", "class_attention", "positions", "layer_scale"}),
    (
        "eva02_tiny_patch14_224",
        {"img_size": 28, "depth": 2, "embed_dim": 24, "num_heads": 3},
        {"class_attention", "mixing", "layer_scale"},
    ),
    (
        "beit_base_patch16_224",
        {"img_size": 48, "embed_dim": 24, "num_heads": 3, "depth": 2},
        {"class_attention", "positions", "mixing"},
    ),
]
"""Models of all families at toy size, and the kinds of a run that they lack."""


def opened(name, arguments):
    torch.manual_seed(0)
    mixers = timm.models.mlp_mixer
    other = {
        "resmlp": {"block_layer": mixers.ResBlock},
        "gmlp": {"block_layer": mixers.SpatialGatingBlock, "mlp_layer": timm.layers.GatedMlp},
    }
    if name in other:
        view = BlockView(mixers.MlpMixer(**arguments, **other[name], mlp_ratio=2.0))
    else:
        view = build(name, arguments)
    head = view.model.head
    if isinstance(head, torch.nn.Linear):
        torch.nn.init.normal_(head.weight, std=0.5)  # timm's mixers start with a head of zeros
    return Inspected(TorchBlocks(view), Bands(view.num_blocks), 0, image_spec_of(view))


def images_for(inspected, count, seed=1):
    colors = np.random.default_rng(seed).random((count, 3, *inspected.image.size), np.float32)
    return ((colors - 0.5) / 0.5).astype(np.float32)


def found(inspected, kind, images=None, labels=None):
    images = images_for(inspected, 6) if images is None else images
    found = analyzed(inspected, (kind,), images, np.zeros(len(images), int) if labels is None else labels)
    assert kind not in found.reasons
    return getattr(found, kind)


def analyzed(inspected, kinds, images, labels):
    plan = AnalysisPlan(AnalysisSettings(what=kinds, orders=2), inspected.bands)
    return analyze(inspected.model, [(images, labels)], plan, inspected=inspected)


def said(kind, result):
    return KINDS[kind].finding(result)


@pytest.mark.parametrize(("name", "arguments", "lacks"), FAMILIES)
def test_every_family_has_its_kinds_and_a_sentence_for_each(name, arguments, lacks, monkeypatch):
    monkeypatch.setattr(excite, "STEPS", 4)
    monkeypatch.setattr(inversion, "STEPS", 4)
    inspected = opened(name, arguments)
    before = {name: value.clone() for name, value in inspected.model.view.weights().items()}
    found = analyzed(inspected, RUN_KINDS, images_for(inspected, 5), np.zeros(5, int))
    for kind, _, result in found.measured:
        assert found.finding(kind).endswith(".")
        for one in getattr(result, "pictures", ()):
            shown = Image.open(io.BytesIO(base64.b64decode(one.source.partition(",")[2])))
            assert min(shown.size) >= 32
    assert {kind for kind in RUN_KINDS if kind in found.reasons} == lacks
    after = inspected.model.view.weights()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize(("name", "arguments"), [family[:2] for family in FAMILIES])
def test_every_family_has_all_kinds_of_any_model(name, arguments):
    pytest.importorskip("sklearn")
    inspected = opened(name, arguments)
    kinds = tuple(kind for kind in KINDS if kind not in (*RUN_KINDS, "umap"))
    images, labels = images_for(inspected, 40), np.arange(40) % 3
    found = analyze(
        inspected.model, [(images, labels)], AnalysisPlan(AnalysisSettings(what=kinds, orders=2), inspected.bands)
    )
    assert not found.reasons.keys() & set(kinds)
    for kind in kinds:
        assert found.finding(kind).endswith(".")
        assert not found.finding(kind).startswith("None")
    assert np.diag(found.similarity.cka) == pytest.approx(1)


def test_position_embeddings_of_a_gradient_are_similar_nearby():
    inspected = opened("vit_digits", VIT)
    assert abs(found(inspected, "positions").correlation) < 0.4
    places = torch.cartesian_prod(torch.arange(4.0), torch.arange(4.0))
    waves = torch.cat([torch.cos(places * 0.5), torch.sin(places * 0.5)], dim=1)
    with torch.no_grad():
        inspected.model.view.model.pos_embed.copy_(torch.nn.functional.pad(waves, (0, 28)))
    result = found(inspected, "positions")
    assert result.correlation < -0.9
    distances, cosines = zip(*result.by_distance, strict=True)
    assert distances == (1, 2, 3, 4)
    assert list(cosines) == sorted(cosines, reverse=True)
    assert "close patches have similar embeddings" in said("positions", result)


def test_components_of_filters_are_those_of_their_covariance():
    inspected = opened("vit_digits", VIT)
    weight = inspected.model.view.model.patch_embed.proj.weight.detach().double().flatten(1).numpy()
    result = found(inspected, "filters")
    variances = np.linalg.eigvalsh(np.cov(weight.T))[::-1][: len(result.explained)]
    assert result.explained == pytest.approx(variances / variances.sum(), abs=1e-9)
    assert sum(result.explained) == pytest.approx(1)
    assert abs(result.smoothness) < 0.15
    with torch.no_grad():
        inspected.model.view.model.patch_embed.proj.weight.copy_(torch.randn(32, 3, 1, 1).expand(32, 3, 4, 4))
    smooth = found(inspected, "filters")
    assert smooth.smoothness == pytest.approx(1)
    assert smooth.needed <= 3


def test_class_attention_is_that_of_the_layers_matrices():
    inspected = opened("cait_xxs24_224", {k: v for k, v in CAIT.items() if k != "patch_size"})
    images = images_for(inspected, 3)
    result = found(inspected, "class_attention", images)
    view, own = inspected.model.view, []
    with torch.no_grad():
        tokens = view.stem(torch.from_numpy(images))
        for index in range(view.num_blocks):
            tokens = view.block(index, tokens, index)
        class_token = view.model.cls_token.expand(3, -1, -1)
        for layer in view.model.blocks_token_only:
            both = layer.norm1(torch.cat((class_token, tokens), dim=1))
            query, key = (
                x.unflatten(-1, (3, 8)).transpose(1, 2) for x in (layer.attn.q(both[:, :1]), layer.attn.k(both))
            )
            weights = (query @ key.transpose(-2, -1) * layer.attn.scale).softmax(dim=-1)
            own.append(weights[:, :, 0, 0].mean(dim=0).tolist())
            class_token = layer(tokens, class_token)
    assert np.array(result.own) == pytest.approx(np.array(own), rel=1e-4)
    assert len(result.pictures) == 9


def test_layer_scale_is_the_mean_magnitude_and_class_layers_come_last():
    inspected = opened("cait_xxs24_224", {k: v for k, v in CAIT.items() if k != "patch_size"})
    with torch.no_grad():
        inspected.model.view.blocks[1].gamma_2.copy_(-0.5 * torch.ones(24))
    result = found(inspected, "layer_scale")
    assert result.layers == ["0", "1", "class 0", "class 1"]
    assert result.branches["MLP"] == pytest.approx([1e-5, 0.5, 1e-5, 1e-5], rel=1e-4)
    assert "largest in layer 1 (0.5)" in said("layer_scale", result)


def test_the_spread_of_mixing_weights():
    inspected = opened("mixer_cifar", MIXER)
    result = found(inspected, "mixing")
    assert result.uniform == pytest.approx(np.sqrt(2 * 1.25))  # places 0 to 3 in both directions
    assert result.spread == pytest.approx([result.uniform] * 2, rel=0.15)
    with torch.no_grad():
        weight = inspected.model.view.blocks[1].mlp_tokens.fc1.weight
        weight.copy_(torch.eye(16)[: len(weight)])
    local = found(inspected, "mixing")
    assert local.spread[1] == pytest.approx(0, abs=1e-6)
    assert "weights of block 1 are closest together" in said("mixing", local)


def test_saliency_is_the_gradient():
    inspected = opened("vit_digits", VIT)
    images = images_for(inspected, 2)
    colors = inspected.colors(images[:1])
    answer = inspected.model.head(run_blocks(inspected, colors, (0, 1, 2)).detach())[0].argmax()
    values = saliency_map(inspected, colors, (0, 1, 2), answer)
    place = np.unravel_index(values.argmax(), values.shape)
    slopes = []
    for channel in range(3):
        moved = [colors.double().clone() for _ in range(2)]
        inspected.model.view.double()
        for one, step in zip(moved, (1e-4, -1e-4), strict=True):
            one[0, channel, place[0], place[1]] += step
        high, low = (
            inspected.model.view.head(run_blocks(inspected, one, (0, 1, 2)))[0, answer].item() for one in moved
        )
        slopes.append(abs(high - low) / 2e-4)
    assert max(slopes) == pytest.approx(values.max(), rel=1e-3)
    inspected.model.view.float()
    alike = found(Inspected(inspected.model, Bands.fixed(3), 0, inspected.image), "saliency", images)
    assert alike.correlation == pytest.approx(1)
    assert 0.1 < alike.top_share < 1


@pytest.mark.parametrize(("name", "arguments"), [("vit_digits", VIT), ("mixer_cifar", MIXER)])
def test_inversion_lowers_its_distance_and_ascent_raises_its_value(name, arguments, monkeypatch):
    monkeypatch.setattr(inversion, "STEPS", 150)
    monkeypatch.setattr(excite, "STEPS", 60)
    inspected = opened(name, arguments)
    inverted = found(inspected, "inversion")
    assert min(inverted.factors) > 5
    assert found(inspected, "inversion") == inverted
    assert f"factor of {inverted.factors[0]:,.0f} after block 0" in said("inversion", inverted)
    excited = found(inspected, "excite")
    assert all(after > before for before, after in zip(excited.noise, excited.reached, strict=True))
    assert found(inspected, "excite") == excited


def test_parts_are_those_of_blocks_computed_without_them():
    inspected = opened("vit_digits", VIT)
    images = images_for(inspected, 8)
    labels = np.arange(8) % 3
    result = found(inspected, "parts", images, labels)
    view = inspected.model.view

    def block(index, x, part=""):
        b = view.blocks[index]
        norm1, norm2 = (b.norm1, b.norm2) if part != "norm" else (lambda y: y, lambda y: y)
        after = x if part == "attention" else x + b.ls1(b.attn(norm1(x)))
        after = after if part == "MLP" else after + b.ls2(b.mlp(norm2(after)))
        return after - x if part == "residual" else after

    def loss(changed, part):
        with torch.no_grad():
            tokens = view.stem(torch.from_numpy(images))
            for index in range(3):
                tokens = block(index, tokens, part if index in changed else "")
            return torch.nn.functional.cross_entropy(view.head(tokens), torch.from_numpy(labels)).item()

    assert [part.name for part in result.parts] == ["norm", "attention", "MLP", "residual"]
    assert result.trained.loss == pytest.approx(loss((), ""), rel=1e-4)
    for part in result.parts:
        assert [one.loss for one in part.blocks] == pytest.approx([loss((i,), part.name) for i in range(3)], rel=1e-4)
        assert part.everywhere.loss == pytest.approx(loss((0, 1, 2), part.name), rel=1e-4)
