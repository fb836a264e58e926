"""Every family of models has its kinds of analysis."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from ls_edge.analysis import KINDS
from ls_edge.analysis.inside import excite, inversion
from tests.analysis.runs import CAIT, MIXER, VIT, analyzed, images_for, opened

RUN_KINDS = tuple(name for name, kind in KINDS.items() if kind.needs_run)
FAMILIES = [
    ("vit_digits", VIT, {"class_attention", "mixing"}),
    ("vit_cifar", {"depth": 2}, {"class_attention", "mixing", "filters", "layer_scale"}),
    ("cait_xxs24_224", CAIT, {"attention", "rollout", "mixing"}),
    ("mixer_cifar", MIXER, {"attention", "rollout", "class_attention", "positions", "layer_scale"}),
    ("resmlp", MIXER, {"attention", "rollout", "class_attention", "positions"}),
    ("gmlp", MIXER, {"attention", "rollout", "class_attention", "positions", "layer_scale"}),
    (
        "eva02_tiny_patch14_224",
        {"img_size": 28, "depth": 2, "embed_dim": 24, "num_heads": 3},
        {"class_attention", "mixing", "layer_scale"},
    ),
    (
        "beit_base_patch16_224",
        {"img_size": 48, "embed_dim": 24, "num_heads": 3, "depth": 2},
        {"class_attention", "positions", "mixing"},
    ),
]
"""Models of all families at toy size, and the kinds of a run that they lack."""


@pytest.mark.parametrize(("name", "arguments", "lacks"), FAMILIES)
def test_every_family_has_its_kinds_and_a_sentence_for_each(name, arguments, lacks, monkeypatch):
    monkeypatch.setattr(excite, "STEPS", 4)
    monkeypatch.setattr(inversion, "STEPS", 4)
    run = opened(name, arguments)
    before = {name: value.clone() for name, value in run.model.view.weights().items()}
    found = analyzed(run, RUN_KINDS, images_for(run, 5), np.zeros(5, int))
    for kind, _, result in found.measured:
        assert found.finding(kind).endswith(".")
        for one in getattr(result, "pictures", ()):
            shown = Image.open(io.BytesIO(base64.b64decode(one.source.partition(",")[2])))
            assert min(shown.size) >= 32
    assert {kind for kind in RUN_KINDS if kind in found.reasons} == lacks
    after = run.model.view.weights()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
