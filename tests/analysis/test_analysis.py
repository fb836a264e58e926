"""The kinds of analysis together: their table, reasons, bands and batches."""

import re
from typing import get_type_hints

import msgspec
import pytest

from ls_edge.analysis import KINDS, Analysis, analyze, check_kinds
from ls_edge.core.bands import Bands
from ls_edge.core.errors import DataError, UsageError
from tests.analysis.models import Residual, analyzed, numbers, plan_of

BASIC = ("importance", "contribution", "similarity", "agreement")


def test_every_result_of_the_document_belongs_to_a_kind():
    plain = {"images", "skipped", "reasons", "settings"}
    assert set(KINDS) == set(get_type_hints(Analysis)) - plain
    for kind in KINDS.values():
        assert re.fullmatch(r"[A-Z].*\.", kind.text)
        assert len(kind.summary) < 65


def test_kinds_are_sorted_and_unknown_ones_refused():
    assert check_kinds(None) == tuple(KINDS)
    assert check_kinds(["agreement", "importance"]) == ("importance", "agreement")
    with pytest.raises(UsageError, match="'x' is not a kind of analysis; use importance, "):
        check_kinds(["importance", "x"])


def test_kinds_of_a_run_have_a_reason_for_other_models():
    of_run = [name for name, kind in KINDS.items() if kind.needs_run]
    found = analyzed(Residual(), *of_run)
    assert {found.reasons[name] for name in of_run} == {
        "an engine shows neither attention nor gradients; analyze the run"
    }


def test_the_size_of_a_batch_makes_no_difference():
    whole, parts = (msgspec.to_builtins(analyzed(Residual(), *BASIC, count=24, size=size)) for size in (24, 5))
    assert numbers(whole) == pytest.approx(numbers(parts), rel=1e-5, abs=1e-6)


def test_a_seed_gives_the_same_document_again_and_another_seed_another():
    assert analyzed(Residual(), *BASIC) == analyzed(Residual(), *BASIC)
    assert analyzed(Residual(), *BASIC, seed=1).agreement != analyzed(Residual(), *BASIC).agreement


def test_no_order_leaves_the_bands():
    bands, ran = Bands.from_json("0/1-3/4"), set()

    class Watched(Residual):
        """Tokens carry the blocks that ran."""

        def stem(self, images):
            return images, ()

        def block(self, index, tokens, slot):
            array, path = tokens
            assert slot == len(path)
            ran.add((*path, index))
            return super().block(index, array, slot), (*path, index)

        def head(self, tokens):
            return super().head(tokens[0])

        def array_of(self, tokens):
            return tokens[0]

    analyzed(Watched(), *BASIC, bands=bands)
    assert len(ran) > 20
    assert all(list(path) == sorted(path, key=bands.band_of) for path in ran)


def test_no_images_are_an_error():
    with pytest.raises(DataError, match="no images"):
        analyze(Residual(), [], plan_of(Residual(), BASIC))
