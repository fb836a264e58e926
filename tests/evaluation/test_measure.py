import numpy as np
import pytest

from ls_edge.core.bands import Bands
from ls_edge.core.errors import DataError
from ls_edge.evaluation.measure import measure_orders, starts_of, walk
from tests.evaluation.models import Digits, plan_of


def test_common_starts_run_once():
    model = Digits(5, lambda order: True)
    orders = plan_of(Bands(5), orders=30).all_orders()
    seen = dict(walk(model, model.stem(np.zeros((4, 3, 2, 2))), orders))
    assert set(seen) == set(orders)
    assert model.runs == len(starts_of(orders)) < sum(map(len, orders))


def test_no_images_are_an_error():
    with pytest.raises(DataError, match="no images"):
        measure_orders(Digits(2, lambda order: True), [], [])
