import numpy as np
import pytest

from tests.analysis.models import Residual, analyzed, drawn, plan_of, softmax


def test_answers_match_orders_run_one_by_one():
    model = Residual()
    images, _ = drawn(model, 20)
    plan = plan_of(model, ["agreement"], orders=12)
    groups = {0: plan.random(), **plan.left_out()}
    assert sorted(groups) == [0, 1, 2, 4]
    _, trained = model.run(images, range(5))
    found = analyzed(model, "agreement", orders=12).agreement
    for one in (found.random, *found.left_out):
        logits = [model.run(images, order)[1] for order in groups[one.left_out]]
        same = np.array([each.argmax(1) == trained.argmax(1) for each in logits])
        assert one.same_class == pytest.approx(same.mean())
        assert one.all_same_class == pytest.approx(same.all(axis=0).mean())
        away = [np.abs(softmax(each) - softmax(trained)).sum(1).mean() / 2 for each in logits]
        assert one.total_variation == pytest.approx(np.mean(away), abs=1e-6)
        assert one.orders == len(logits)
