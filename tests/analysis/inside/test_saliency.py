import numpy as np
import pytest

from ls_edge.analysis.inside.saliency import saliency_map
from ls_edge.core.bands import Bands
from ls_edge.training.inspection.gradients import run_blocks
from ls_edge.training.inspection.inspected import Inspected
from tests.analysis.runs import VIT, images_for, measured, opened


def test_saliency_is_the_gradient_of_the_logit_and_the_same_in_a_fixed_order():
    run = opened("vit_digits", VIT)
    images = images_for(run, 2)
    colors = run.colors(images[:1])
    answer = run.model.head(run_blocks(run, colors, (0, 1, 2)).detach())[0].argmax()
    values = saliency_map(run, colors, (0, 1, 2), answer)
    place = np.unravel_index(values.argmax(), values.shape)
    slopes = []
    for channel in range(3):
        moved = [colors.double().clone() for _ in range(2)]
        run.model.view.double()
        for one, step in zip(moved, (1e-4, -1e-4), strict=True):
            one[0, channel, place[0], place[1]] += step
        high, low = (run.model.view.head(run_blocks(run, one, (0, 1, 2)))[0, answer].item() for one in moved)
        slopes.append(abs(high - low) / 2e-4)
    assert max(slopes) == pytest.approx(values.max(), rel=1e-3)
    run.model.view.float()
    alike = measured(Inspected(run.model, Bands.ladder(3)[0], 0, run.image), "saliency", images)
    assert alike.correlation == pytest.approx(1)
    assert 0.1 < alike.top_share < 1
