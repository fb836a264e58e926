"""Toy models of all families as runs to inspect."""

import numpy as np
import timm
import torch

from ls_edge.analysis import analyze
from ls_edge.analysis.plan import AnalysisPlan, AnalysisSettings
from ls_edge.core.bands import Bands
from ls_edge.training.inspection.inspected import Inspected
from ls_edge.training.models.small_models import build, image_spec_of
from ls_edge.training.models.torch_blocks import TorchBlocks
from ls_edge.training.models.view import BlockView

VIT = {"depth": 3, "embed_dim": 32}
CAIT = {"img_size": 32, "embed_dim": 24, "num_heads": 3, "depth": 2, "num_classes": 3}
MIXER = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "num_classes": 3, "num_blocks": 2}


def inspected(view, bands=None):
    return Inspected(TorchBlocks(view), bands or Bands(view.num_blocks), 0, image_spec_of(view))


def opened(name, arguments):
    """A model of a family with seeded weights."""
    torch.manual_seed(0)
    mixers = timm.models.mlp_mixer
    other = {
        "resmlp": {"block_layer": mixers.ResBlock},
        "gmlp": {"block_layer": mixers.SpatialGatingBlock, "mlp_layer": timm.layers.GatedMlp},
    }
    if name in other:
        view = BlockView(mixers.MlpMixer(**arguments, **other[name], mlp_ratio=2.0))
    else:
        view = build(name, arguments)
    head = view.model.head
    if isinstance(head, torch.nn.Linear):
        torch.nn.init.normal_(head.weight, std=0.5)  # timm's mixers start with a head of zeros
    return inspected(view)


def images_for(run, count=6, seed=1):
    colors = np.random.default_rng(seed).random((count, 3, *run.image.size), np.float32)
    return ((colors - 0.5) / 0.5).astype(np.float32)


def analyzed(run, kinds, images=None, labels=None, size=64):
    """The analysis of a run, in two random orders and in batches of ``size`` images."""
    images = images_for(run) if images is None else images
    labels = np.zeros(len(images), int) if labels is None else labels
    plan = AnalysisPlan(AnalysisSettings(what=tuple(kinds), orders=2), run.bands)
    batches = [(images[at : at + size], labels[at : at + size]) for at in range(0, len(images), size)]
    return analyze(run.model, batches, plan, inspected=run)


def measured(run, kind, *batches, **options):
    """The result of one kind."""
    found = analyzed(run, (kind,), *batches, **options)
    assert kind not in found.reasons
    return getattr(found, kind)
