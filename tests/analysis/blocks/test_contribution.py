import numpy as np
import pytest

from tests.analysis.models import Residual, analyzed, drawn, plan_of


def ratio(before, after):
    return np.mean(np.linalg.norm(after - before, axis=2) / np.linalg.norm(before, axis=2))


def test_ratios_are_means_over_orders_run_one_by_one():
    model = Residual()
    images, _ = drawn(model, 20)
    plan = plan_of(model, ["contribution"], orders=12)
    found = analyzed(model, "contribution", orders=12).contribution
    steps, _ = model.run(images, range(5))
    assert found.trained == [pytest.approx(ratio(before, after), rel=1e-5) for _, _, before, after in steps]
    ratios = {}
    for order in plan.random():
        for block, slot, before, after in model.run(images, order)[0]:
            ratios.setdefault((block, slot), []).append(ratio(before, after))
    for block in range(5):
        for slot in range(5):
            value = found.random[block][slot]
            assert value == (pytest.approx(np.mean(ratios[block, slot]), rel=1e-5) if (block, slot) in ratios else None)


def test_a_block_of_zeros_adds_nothing():
    found = analyzed(Residual(zeroed=[2]), "contribution").contribution
    assert found.trained[2] == 0
    assert {value for value in found.random[2] if value is not None} == {0}
