"""Attention rollout against a published implementation on the same weights."""

import numpy as np
import pytest
import torch

from ls_edge.analysis.inside.rollout import inspect, rollout_of
from ls_edge.training.models.small_models import build
from tests.analysis.runs import inspected


def published(attentions):
    """Rollout as github.com/jacobgil/vit-explain computes it (vit_rollout.py, mean over heads, nothing discarded)."""
    result = torch.eye(attentions[0].size(-1))
    for attention in attentions:
        fused = attention.mean(axis=1)
        identity = torch.eye(fused.size(-1))
        a = (fused + 1.0 * identity) / 2
        a = a / a.sum(dim=-1, keepdim=True)
        result = torch.matmul(a, result)
    return result


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
@pytest.mark.parametrize("args", [{}, {"class_token": True, "global_pool": "token"}])
def test_rollout_equals_the_published_implementation(args, order):
    torch.manual_seed(0)
    view = build("vit_digits", {"depth": 3, "embed_dim": 32, **args})
    run = inspected(view)
    model = run.model
    images = np.random.default_rng(0).standard_normal((2, 3, 16, 16)).astype(np.float32)
    seen, tokens = [], model.stem(images)
    for block in order:
        with torch.no_grad():
            attn = view.blocks[block].attn
            x = view.blocks[block].norm1(tokens)
            q, k, _ = attn.qkv(x).reshape(2, x.shape[1], 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)
            seen.append((q @ k.transpose(-2, -1) * attn.scale).softmax(dim=-1))
        tokens = model.block(block, tokens, 0)
    whole = published(seen)
    expected = whole[:, 0, 1:] if args else whole.mean(dim=1)
    found = rollout_of(run, model.stem(images), order).reshape(2, -1)
    assert found == pytest.approx(expected.numpy(), rel=1e-4)
    found = inspect(run, [(images, None)])
    assert found.images == 2
    texts = ["trained order", "random order"]
    assert [one.text for one in found.pictures] == ["image 1", *texts, "image 2", *texts]
    assert -1 <= found.correlation < 1
