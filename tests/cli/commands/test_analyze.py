"""``ls-edge analyze`` of a run and of the bundle that was exported from it."""

import json
import sys
from dataclasses import replace

import msgspec
import pytest

import ls_edge
from ls_edge.analysis import KINDS, Analysis
from ls_edge.analysis.overview import verdict
from ls_edge.data.datasets import open_data
from tests.analysis.models import numbers

RUN_KINDS = {name for name, kind in KINDS.items() if kind.needs_run}

FEW = ("--data", "digits", "--limit", 24, "--orders", 4, "--threads", 1)


@pytest.fixture(scope="module")
def both(tiny_bundle):
    """A run, and its bundle."""
    return tiny_bundle.parent / "run", tiny_bundle


@pytest.fixture(autouse=True)
def without_umap(monkeypatch):
    """UMAP compiles for half a minute; ``tests/analysis/blocks/test_umap.py`` runs it."""
    monkeypatch.setitem(sys.modules, "umap", None)


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    """``tests/analysis/inside`` takes as many as the command."""
    monkeypatch.setattr("ls_edge.analysis.inside.excite.STEPS", 4)
    monkeypatch.setattr("ls_edge.analysis.inside.inversion.STEPS", 4)


def document(command, *arguments):
    code, out, err = command("analyze", *arguments, "--json")
    assert code == 0, err
    msgspec.json.decode(out, type=Analysis)
    return json.loads(out)


def test_each_image_counts_once_in_tests(both):
    """Repeated images would make an effect on few of them certain."""
    digits = open_data("digits", "eval")
    few = replace(digits, images=digits.images[:20])
    found = ls_edge.analyze(both[1], few, what=("importance",), limit=60, threads=1)
    assert (found.images, found.importance.blocks[0].left_out_changes.images) == (20, 20)


def test_a_run_and_its_bundle_give_the_same_numbers(command, both):
    run, bundle = (document(command, path, *FEW) for path in both)
    lacks = {"class_attention", "mixing"}
    assert set(run["reasons"]) - {"probe", "umap"} == lacks  # 24 images are too few
    assert set(bundle["reasons"]) - set(run["reasons"]) == RUN_KINDS - lacks
    assert bundle["attention"] is None
    assert len(run["attention"]["distance"]) == 6
    assert run["rollout"]["images"] == 24
    for kind in ("importance", "contribution", "similarity", "agreement", "slots", "pairs"):
        assert len(numbers(run[kind])) > 5
        assert numbers(bundle[kind]) == pytest.approx(numbers(run[kind]), rel=1e-4, abs=1e-4)


def test_the_document_has_every_kind_and_the_settings(command, both):
    found = document(command, both[1], *FEW, "--batch-size", 7)
    assert set(found) == {"images", "skipped", *KINDS, "reasons", "settings"}
    assert (found["images"], found["skipped"]) == (24, 0)
    assert found["settings"]["what"] == list(KINDS)
    assert found["settings"]["orders"] == 4
    assert found["settings"]["seed"] == 0
    assert found["settings"]["bands"] == [[0, 1, 2, 3, 4, 5]]


def test_only_the_kinds_that_were_asked_for_are_measured(command, both):
    found = document(command, both[1], *FEW, "--what", "attention,agreement", "--bands", "0/1-4/5")
    assert found["agreement"] is not None
    assert "shows neither attention nor gradients" in found["reasons"].pop("attention")
    assert found["reasons"] == dict.fromkeys(set(KINDS) - {"agreement", "attention"}, "not asked for")
    assert found["settings"]["bands"] == [[0], [1, 2, 3, 4], [5]]


def test_blocks_move_within_the_bands_of_a_bundle(command, banded_bundle):
    found = document(command, banded_bundle, *FEW, "--what", "importance,contribution")
    moves = [one["moved_to"] for one in found["importance"]["blocks"]]
    assert moves == [None, 4, 4, 1, 1, None]
    assert found["contribution"]["random"][0][1:] == [None] * 5


def test_the_verdict_is_given(command, banded_bundle, both):
    found = msgspec.convert(document(command, banded_bundle, *FEW), Analysis)
    share = f"{100 * found.agreement.random.same_class:.1f} %"
    said = verdict(found)
    assert f"{share} of the answers (95 % CI " in said
    assert found.importance.costs in said
    fixed = msgspec.convert(document(command, both[1], *FEW, "--bands", "0/1/2/3/4/5", "--what", "agreement"), Analysis)
    assert verdict(fixed) == ""
    agree = msgspec.structs.replace(found.agreement.random, same_class=0.97)
    steady = msgspec.structs.replace(
        found, importance=None, images=2000, agreement=msgspec.structs.replace(found.agreement, random=agree)
    )
    said = "97.0 % of the answers (95 % CI 96.2 % to 97.7 %) stay the same in random order."
    assert verdict(steady) == f"Block order hardly matters: {said}"
    few = verdict(msgspec.structs.replace(steady, images=24))
    assert few.startswith("Cannot tell with 24 images how much block order matters: 97.0 %")


def test_the_table_has_a_row_for_each_block(command, both):
    code, out, err = command("analyze", both[0], *FEW)
    assert code == 0, err
    lines = out.splitlines()
    assert "6 blocks, 24 images of digits" in lines[0]
    assert lines[1].startswith("Block order matters: ")
    assert lines[3].split()[:3] == ["block", "loss", "without"]
    assert [line.split()[0] for line in lines[4:10]] == list("012345")
    assert "answers in random order, compared with trained order:" in lines
    assert "pairs: Blocks " in out
    assert "\nattention: none" not in err
    code, out, err = command("analyze", both[1], *FEW, "--what", "contribution,attention")
    assert code == 0
    assert "attention: none, an engine shows neither" in err
    assert "loss" not in out


@pytest.mark.leaks_ok  # what draws keeps threads for the process
def test_the_page_has_the_charts_and_pictures_of_each_kind(command, both, tmp_path):
    path = tmp_path / "a.html"
    code, _, err = command("analyze", both[0], *FEW, "--report", path)
    assert code == 0, err
    page = path.read_text()
    assert page.count("data-chart=") == 13
    maps = 2 * 4 * 3  # rollout and saliency: four images, each with two maps
    assert page.count('<img src="data:image/png;base64,') == maps + 1 + 2 + 4 + 2 * (1 + 4)
    assert "VisionTransformer has no class-attention layers" in page
    assert "vegaEmbed(" in page
    code, _, err = command("analyze", both[1], *FEW, "--report", path, "--what", "importance,attention")
    assert code == 0, err
    page = path.read_text()
    assert page.count("data-chart=") == 1
    assert "not asked for" not in page
    assert "None: an engine shows neither attention nor gradients" in page


@pytest.mark.leaks_ok  # what draws keeps threads for the process
def test_two_models_are_shown_side_by_side(command, both, tmp_path):
    what = ("--what", "slots,norms,pairs", "--report", tmp_path / "both.html")
    code, out, err = command("analyze", both[0], both[1], *FEW, *what, "--json")
    assert code == 0, err
    first, second = json.loads(out)["analyses"]
    assert [one["settings"]["of"] for one in (first, second)] == list(map(str, both))
    assert numbers(first["slots"]) == pytest.approx(numbers(second["slots"]))
    page = (tmp_path / "both.html").read_text()
    assert page.count("data-chart=") == 6
    assert page.count("add most within one slot of their trained place") == 2
    code, out, err = command("analyze", both[0], both[1], *FEW, "--what", "slots")
    assert out.count("6 blocks, 24 images of digits") == 2


def test_a_folder_of_runs_is_refused(command, both, tmp_path):
    (tmp_path / "seed-0").symlink_to(both[0])
    code, out, err = command("analyze", tmp_path, *FEW)
    assert (code, out) == (2, "")
    assert "is a folder of runs; name one of them" in err
