import numpy as np
import pytest
import torch

from ls_edge.analysis.inside.mixing import MIXING
from tests.analysis.runs import MIXER, measured, opened


def test_the_spread_of_weights_is_their_distance_from_the_center():
    run = opened("mixer_cifar", MIXER)
    result = measured(run, "mixing")
    assert result.uniform == pytest.approx(np.sqrt(2 * 1.25))  # places 0 to 3 in both directions
    assert result.spread == pytest.approx([result.uniform] * 2, rel=0.15)
    with torch.no_grad():
        weight = run.model.view.blocks[1].mlp_tokens.fc1.weight
        weight.copy_(torch.eye(16)[: len(weight)])
    local = measured(run, "mixing")
    assert local.spread[1] == pytest.approx(0, abs=1e-6)
    assert "weights of block 1 are closest together" in MIXING.finding(local)
