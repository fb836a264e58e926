import numpy as np
import pytest
import torch

from tests.analysis.runs import VIT, measured, opened


def test_components_match_the_covariance_of_the_filters():
    run = opened("vit_digits", VIT)
    weight = run.model.view.model.patch_embed.proj.weight.detach().double().flatten(1).numpy()
    result = measured(run, "filters")
    variances = np.linalg.eigvalsh(np.cov(weight.T))[::-1][: len(result.explained)]
    assert result.explained == pytest.approx(variances / variances.sum(), abs=1e-9)
    assert sum(result.explained) == pytest.approx(1)
    assert abs(result.smoothness) < 0.15
    with torch.no_grad():
        run.model.view.model.patch_embed.proj.weight.copy_(torch.randn(32, 3, 1, 1).expand(32, 3, 4, 4))
    smooth = measured(run, "filters")
    assert smooth.smoothness == pytest.approx(1)
    assert smooth.needed <= 3
