"""Attention by block and head, compared with weights computed from the layers' matrices."""

import numpy as np
import pytest
import timm
import torch

from ls_edge.training.models.small_models import build
from tests.analysis.runs import analyzed, images_for, inspected, measured


@pytest.mark.parametrize(
    ("name", "arguments", "prefix"),
    [
        ("vit_digits", {"depth": 3, "embed_dim": 24, "num_heads": 3}, 0),
        ("vit_tiny_patch16_224", {"depth": 2, "img_size": 48, "num_classes": 3, "reg_tokens": 2}, 3),
    ],
)
def test_distance_and_entropy_match_the_weights(name, arguments, prefix):
    run = inspected(build(name, arguments))
    model = run.model
    with torch.no_grad():
        for parameter in model.view.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)  # attention that differs between heads
    images = images_for(run, 5)
    found = measured(run, "attention", images, size=3)
    height, width = found.grid
    assert found.prefix_tokens == prefix
    places = np.array([(row, column) for row in range(height) for column in range(width)], float)
    apart = np.sqrt(((places[:, None] - places[None]) ** 2).sum(-1))
    tokens = model.stem(images)
    for index, block in enumerate(model.view.blocks):
        with torch.inference_mode():
            inner = block.norm1(tokens)
            heads = block.attn.num_heads
            count, dim = inner.shape[1:]
            q, k, _ = block.attn.qkv(inner).reshape(5, count, 3, heads, dim // heads).permute(2, 0, 3, 1, 4)
            weights = (q @ k.transpose(-2, -1) / (dim // heads) ** 0.5).softmax(-1).double().numpy()
        entropy = -(weights * np.log(weights)).sum(-1).mean(axis=(0, 2))
        patches = weights[:, :, prefix:, prefix:]
        distance = (patches / patches.sum(-1, keepdims=True) * apart).sum(-1).mean(axis=(0, 2))
        assert found.entropy[index] == pytest.approx(entropy, rel=1e-4)
        assert found.distance[index] == pytest.approx(distance, rel=1e-4)
        tokens = model.block(index, tokens, index)
    assert len({round(value, 4) for value in found.distance[-1]}) > 1


@pytest.mark.parametrize("fused", [True, False])
def test_fused_attention_and_answers_are_unchanged(fused):
    run = inspected(build("vit_digits", {"depth": 2, "embed_dim": 24, "num_heads": 3}))
    model = run.model
    for block in model.view.blocks:
        block.attn.fused_attn = fused
    images = images_for(run, 2)
    before = model.head(model.block(0, model.stem(images), 0))
    measured(run, "attention", images)
    assert [block.attn.fused_attn for block in model.view.blocks] == [fused] * 2
    assert not any(block.attn.attn_drop._forward_pre_hooks for block in model.view.blocks)
    assert np.array_equal(model.head(model.block(0, model.stem(images), 0)), before)


@pytest.mark.parametrize(
    ("name", "arguments", "prefix"),
    [
        ("eva02_tiny_patch14_224", {"img_size": 56}, 1),
        ("vit_small_patch16_dinov3", {"img_size": 64}, 5),
        ("beit_base_patch16_224", {"img_size": 48, "embed_dim": 24, "num_heads": 3}, 1),
    ],
)
def test_families_with_rotary_positions_and_biases_have_statistics(name, arguments, prefix):
    if not timm.is_model(name):
        pytest.skip(f"this timm has no {name}")
    found = measured(inspected(build(name, {"num_classes": 3, **arguments}, kept=[0, 1])), "attention")
    assert found.prefix_tokens == prefix
    patches = found.grid[0] * found.grid[1]
    assert len(found.entropy) == len(found.distance) == 2
    assert all(0 < value <= np.log(patches + prefix) + 1e-9 for heads in found.entropy for value in heads)
    assert all(0 < value < sum(found.grid) for heads in found.distance for value in heads)


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("cait_xxs24_224", {"img_size": 32, "embed_dim": 24, "num_heads": 3}, "Cait has TalkingHeadAttn"),
        ("mixer_cifar", {}, "MlpMixer has no attention"),
    ],
)
def test_families_without_plain_attention_have_a_reason(name, arguments, why):
    found = analyzed(inspected(build(name, arguments, kept=[0, 1])), ["attention", "layer_scale"])
    assert why in found.reasons["attention"]
    assert found.attention is None
