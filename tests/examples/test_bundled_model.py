"""The bundle of ``examples/pretrained`` runs at once: whole files, and right answers to the pictures next to it."""

from pathlib import Path

from ls_edge.core.bundle import Bundle
from ls_edge.data.datasets import open_data
from ls_edge.data.preprocess import Preprocessor, iterate
from ls_edge.engines.pipeline import Pipeline

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_bundle_of_the_pretrained_model_answers_in_any_order():
    bundle = Bundle.open(EXAMPLES / "pretrained" / "bundle")
    assert set(bundle.owners) == {0}
    assert sum({part.file: part.bytes for _, part in bundle.manifest.part_names()}.values()) < 12e6
    images = open_data(str(EXAMPLES / "cifar10" / "images"), "eval")
    assert images.classes == bundle.manifest.classes
    right = 0
    with Pipeline.open(bundle, threads=1) as pipeline:
        for _, image, pixels in iterate(images, Preprocessor(bundle.manifest.image)):
            logits = pipeline.forward(pixels[None])
            assert (logits == pipeline.forward(pixels[None], range(11, -1, -1))).all()
            right += int(logits.argmax()) == image.label
    assert right >= 8  # of ten
