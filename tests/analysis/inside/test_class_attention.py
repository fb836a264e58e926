import numpy as np
import pytest
import torch

from tests.analysis.runs import CAIT, images_for, measured, opened


def test_class_attention_matches_the_matrices_of_the_layers():
    run = opened("cait_xxs24_224", CAIT)
    images = images_for(run, 3)
    result = measured(run, "class_attention", images)
    view, own = run.model.view, []
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
