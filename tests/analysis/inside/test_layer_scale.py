import pytest
import torch

from ls_edge.analysis.inside.layer_scale import LAYER_SCALE
from tests.analysis.runs import CAIT, measured, opened


def test_layer_scale_is_the_mean_magnitude_and_class_layers_come_last():
    run = opened("cait_xxs24_224", CAIT)
    with torch.no_grad():
        run.model.view.blocks[1].gamma_2.copy_(-0.5 * torch.ones(24))
    result = measured(run, "layer_scale")
    assert result.layers == ["0", "1", "class 0", "class 1"]
    assert result.branches["MLP"] == pytest.approx([1e-5, 0.5, 1e-5, 1e-5], rel=1e-4)
    assert "largest in layer 1 (0.5)" in LAYER_SCALE.finding(result)
