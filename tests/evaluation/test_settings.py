import msgspec
import numpy as np
import pytest

from ls_edge.core.bands import Bands
from ls_edge.core.errors import UsageError
from ls_edge.evaluation.orders import EvaluationOrders
from ls_edge.evaluation.settings import EvaluationSettings


def test_every_setting_has_a_help_text_and_a_default():
    for field in msgspec.inspect.type_info(EvaluationSettings).fields:
        assert field.type.extra["help"]
        assert not field.required


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"orders": 0}, "orders is 0; it has to be a whole number from 1 to 100000"),
        ({"ordrs": 3}, "unknown key 'ordrs'; did you mean 'orders'?"),
        ({"keep": [2, 0]}, r"keep\[1\] is 0; it has to be a whole number from 1 to 10000"),
        ({"precision": "int8"}, "precision is 'int8'; it has to be one of bf16, fp16, fp32"),
        ({"limit": "10"}, "limit is '10'; it has to be a whole number"),
    ],
)
def test_wrong_settings_are_usage_errors(given, message):
    with pytest.raises(UsageError, match=message):
        EvaluationSettings.of(given)


def test_numbers_of_numpy_and_ranges_are_accepted():
    found = EvaluationSettings.of({"limit": np.int64(7), "keep": range(1, 3), "orders": np.array(5)})
    assert (found.limit, found.keep, found.orders) == (7, (1, 2), 5)


def test_bands_must_fit_the_model():
    assert EvaluationSettings(bands="0/1-3").bands_of(Bands(4)) == Bands.from_json("0/1-3")
    assert EvaluationSettings().bands_of(Bands.ladder(4)[0]) == Bands.ladder(4)[0]
    with pytest.raises(UsageError, match="bands 0/1-3"):
        EvaluationSettings(bands="0/1-3").bands_of(Bands(5))


def test_more_blocks_than_the_model_has_cannot_be_kept():
    with pytest.raises(UsageError, match="keep 5 is not possible; give 1 to 4, the number of blocks"):
        EvaluationOrders(EvaluationSettings(keep=(5,)), Bands(4))
