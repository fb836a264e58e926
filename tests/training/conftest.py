"""Fixtures of the tests of training."""

import pytest


@pytest.fixture
def faulty():
    """The class of the model ``vit_faulty``; a test sets its ``fault``."""
    from tests.training.faulty_models import Faulty

    yield Faulty
    Faulty.steps, Faulty.fault = 0, None
