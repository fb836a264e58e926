"""Bundles for the runtime's tests: real exports of a tiny vision transformer whose weights are random, but not small.

timm's own initialisation makes blocks that change the tokens very little, so that any order would give nearly the same
logits; these weights are drawn so that order, a skipped block and other weights all show.
"""

import pytest

BLOCKS = 6


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory):
    """The folder of a bundle: 6 blocks of width 32, 16 tokens, 16x16 pixels, 10 classes."""
    return _export(tmp_path_factory.mktemp("tiny"), seed=0)


@pytest.fixture(scope="session")
def other_bundle(tmp_path_factory):
    """A bundle of the same shape as ``tiny_bundle`` with other weights, so with another model id."""
    return _export(tmp_path_factory.mktemp("other"), seed=1)


def _export(folder, seed):
    import torch

    from ls_edge.export.writer import export_run
    from ls_edge.training.checkpoint import load_run, save_run
    from ls_edge.training.config import RunRecord, TrainConfig
    from ls_edge.training.models import build, image_spec_of

    torch.set_num_threads(1)
    args = {"depth": BLOCKS, "embed_dim": 32}
    view = build("vit_digits", args)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in view.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, parameter[0].numel() ** -0.5, generator=generator)
    record = RunRecord(
        version="0", model="vit_digits", model_args=args, kept=tuple(range(BLOCKS)), classes=tuple("0123456789"),
        image=image_spec_of(view), trained_on="", method="shuffle",
    )  # fmt: skip
    save_run(folder / "run", view, TrainConfig(), record)
    return export_run(load_run(folder / "run"), folder / "bundle").bundle.folder
