"""Bands in a bundle, and a first and a last band that stem and head run."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from ls_edge.cli.main import main
from ls_edge.core.arrangement import Arrangement
from ls_edge.core.bands import Bands
from ls_edge.core.bundle import NOT_FOLDED, Bundle, Folded, digest_of, interface_of
from ls_edge.core.errors import UsageError, VerificationError
from ls_edge.engines.pipeline import Pipeline
from ls_edge.export.calibration import Calibration, Samples
from ls_edge.export.settings import ExportSettings
from ls_edge.export.targets import PartsView
from ls_edge.export.verify import SHUFFLED, generated_images, verify_numbers, verify_run
from ls_edge.export.writer import export_run, parts_of
from ls_edge.report.bundle import print_export
from ls_edge.report.terminal import open_console
from ls_edge.training.models.slots import SlotEmbedding
from ls_edge.training.models.view import BlockView
from ls_edge.training.runs.checkpoint import load_run
from tests.arrangements import arrangement_of

IMAGES = np.random.default_rng(1).standard_normal((2, 3, 16, 16), dtype=np.float32)
DEPTH = 5


@pytest.fixture(scope="module")
def run(make_run, tmp_path_factory):
    """Five blocks in the bands 0/1-3/4."""
    return with_bands(load_run(make_run(tmp_path_factory.mktemp("bands") / "run", depth=DEPTH)), "0/1-3/4")


def with_bands(run, bands):
    return dataclasses.replace(run, bands=Bands.from_json(bands, run.view.num_blocks))


@pytest.fixture(scope="module")
def banded(run, tmp_path_factory):
    return export_run(run, tmp_path_factory.mktemp("banded") / "bundle").bundle


@pytest.fixture(scope="module")
def folded(run, tmp_path_factory):
    settings = ExportSettings(fold_ends=True, whole=True)
    return export_run(run, tmp_path_factory.mktemp("folded") / "bundle", settings).bundle


def test_a_bundle_has_the_bands_of_its_run(run, banded):
    assert banded.bands == run.bands
    assert json.loads((banded.folder / "manifest.json").read_bytes())["bands"] == [[0], [1, 2, 3], [4]]


def test_a_bundle_is_verified_in_orders_within_its_bands(run, banded):
    class Recorded(PartsView):
        def forward(self, images, arrangement):
            ran.append(tuple(arrangement))
            return super().forward(images, arrangement)

    ran = []
    view = Recorded(run.view, bands=run.bands)
    with Pipeline.open(banded, threads=1, provider="cpu") as chain:
        verify_numbers(view, chain, generated_images(run.record.image), source="generated", precision="fp32")
    assert len(set(ran)) == SHUFFLED
    for order in ran:
        assert not run.bands.fault(Arrangement.plain(order))


@pytest.mark.release
def test_other_bands_can_be_given_and_wider_ones_give_a_warning(run, banded, tmp_path):
    assert str(parts_of(run, ExportSettings(bands="0/1/2-3/4")).bands) == "0/1/2-3/4"
    wider = export_run(run, tmp_path / "wider", ExportSettings(bands="0-4"))
    assert wider.bundle.bands.is_one
    assert wider.bundle.manifest.model_id != banded.manifest.model_id
    # The files name the model that they are of, and differ in nothing else.
    sizes = [[(part.file, part.bytes) for part in of.manifest.parts.blocks] for of in (wider.bundle, banded)]
    assert sizes[0] == sizes[1]
    (warning,) = wider.warnings
    assert "the bands 0-4 allow orders that" in warning
    assert "(its bands are 0/1-3/4)" in warning
    with pytest.raises(UsageError, match="the model has 0 to 4"):
        parts_of(run, ExportSettings(bands="0/1-3"))


def test_folded_ends_are_run_by_stem_and_head(run, folded, banded):
    assert (folded.num_blocks, folded.bands, folded.folded) == (3, Bands(3), Folded(1, 1))
    assert (banded.folded, "folded" in json.loads((banded.folder / "manifest.json").read_bytes())) == (
        NOT_FOLDED,
        False,
    )
    assert json.loads((folded.folder / "manifest.json").read_bytes())["folded"] == {"stem": 1, "head": 1}
    with torch.no_grad(), Pipeline.open(folded, threads=1, provider="cpu") as chain:
        for order, whole in (((0, 1, 2), (0, 1, 2, 3, 4)), ((2, 0, 1), (0, 3, 1, 2, 4)), ((1,), (0, 2, 4))):
            expected = run.view(torch.from_numpy(IMAGES), whole).numpy()
            np.testing.assert_allclose(chain.forward(IMAGES, order), expected, rtol=0, atol=1e-5)
    import onnxruntime

    whole = onnxruntime.InferenceSession(folded.read("whole")).run(None, {"images": IMAGES})[0]
    with torch.no_grad():
        np.testing.assert_allclose(whole, run.view(torch.from_numpy(IMAGES)).numpy(), rtol=0, atol=1e-5)


def test_folding_other_ends_makes_another_model(folded):
    m = folded.manifest
    ids = {
        digest_of(interface_of(m.image, m.tokens, Bands(3), m.classes, needs_slot=False, folded=ends))
        for ends in (NOT_FOLDED, Folded(1, 1), Folded(2, 0))
    }
    assert len(ids) == 3


def test_a_folded_bundle_is_verified_with_its_run(run, folded, banded):
    for bundle in (folded, banded):
        assert verify_run(bundle, run).max_rel_error <= 1e-5
    shortened = dataclasses.replace(run, view=BlockView(run.view.model), weights_sha256="0" * 64)
    with pytest.raises(VerificationError, match="belongs to model"):
        verify_run(folded, shortened)


@pytest.mark.release
def test_slots_continue_after_folded_blocks(run, tmp_path):
    torch.manual_seed(0)
    view = BlockView(run.view.model)
    view.slots = SlotEmbedding(view.num_blocks, view.token_spec.dim)
    view.eval()
    slotted = dataclasses.replace(run, view=view)
    bundle = export_run(slotted, tmp_path / "bundle", ExportSettings(fold_ends=True, whole=True)).bundle
    tracks = arrangement_of([[[2], [0, 1]]])
    inside = arrangement_of([[[0]], [[3], [1, 2]], [[4]]])
    with torch.no_grad(), Pipeline.open(bundle, threads=1, provider="cpu") as chain:
        for ours, theirs in (((2, 0, 1), (0, 3, 1, 2, 4)), (tracks, inside)):
            expected = view(torch.from_numpy(IMAGES), theirs).numpy()
            np.testing.assert_allclose(chain.forward(IMAGES, ours), expected, rtol=0, atol=1e-5)


@pytest.mark.release
def test_a_folded_bundle_has_ranges_and_costs_of_its_parts(make_run, tmp_path):
    def calm(view):
        for block in view.blocks:
            block.mlp.fc2.weight.mul_(0.5)

    run = with_bands(load_run(make_run(tmp_path / "run", depth=DEPTH, change=calm)), "0/1-3/4")
    images = generated_images(run.record.image, 24)
    samples = Samples(images[::2], None), Samples(images[1::2], None)
    settings = ExportSettings(precision="int8", engine="tensorrt", fold_ends=True)
    found = export_run(run, tmp_path / "bundle", settings, calibration=Calibration("waves", *samples)).bundle
    assert found.manifest.verified["min_cosine"] >= 0.999


@pytest.mark.release
def test_the_commands_report_bands_and_folded_ends(make_run, tmp_path, capsys):
    make_run(tmp_path / "run", depth=3)

    def call(*words):
        with pytest.raises(SystemExit) as caught:
            main([str(word) for word in words])
        return caught.value.code, *capsys.readouterr()

    out = tmp_path / "bundle"
    code, text, err = call("export", tmp_path / "run", "--out", out, "--bands", "0/1-2", "--fold-ends", "--json")
    assert code == 0, err
    document = json.loads(text)
    assert (document["bands"], document["folded"]) == ([[0, 1]], {"stem": 1, "head": 0})
    assert Bundle.open(out).bands == Bands(2)
    print_export(document, open_console())
    assert "1 block folded into the stem" in capsys.readouterr().out
    assert call("verify", out, "--run", tmp_path / "run")[0] == 0
    code, text, err = call("export", tmp_path / "run", "--out", out, "--fold-ends")
    assert (code, text, err.count("\n")) == (2, "", 1)
    assert "leave it out, or give other bands with --bands" in err
