import numpy as np
import pytest
import torch

from tests.analysis.runs import VIT, images_for, measured, opened


def test_scores_match_blocks_computed_without_the_part():
    run = opened("vit_digits", VIT)
    images = images_for(run, 8)
    labels = np.arange(8) % 3
    result = measured(run, "parts", images, labels)
    view = run.model.view

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
