"""A run of a tiny vision transformer with a class token, and its bundle; the random weights are large."""

import pytest

DEPTH = 3
EPOCHS = 10


@pytest.fixture(scope="session")
def make_run():
    """Write a run folder and return it; ``change(view)`` may alter the weights."""
    import torch

    from ls_edge.training.config import RunRecord, TrainConfig
    from ls_edge.training.models.small_models import build, image_spec_of
    from ls_edge.training.runs.checkpoint import save_run

    def make(folder, seed=0, change=lambda view: None, depth=DEPTH):
        torch.set_num_threads(1)
        torch.manual_seed(seed)  # dropout of a `change` that trains
        args = {"depth": depth, "embed_dim": 32, "class_token": True, "global_pool": "token"}
        view = build("vit_digits", args)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in view.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, parameter[0].numel() ** -0.5, generator=generator)
            change(view)
        record = RunRecord(
            version="0", model="vit_digits", model_args=args, kept=tuple(range(depth)), classes=tuple("0123456789"),
            image=image_spec_of(view), trained_on="", method="shuffle",
        )  # fmt: skip
        save_run(folder, view, TrainConfig(), record)
        return folder

    return make


@pytest.fixture(scope="session")
def trained(make_run, made_once):
    """Return a run that learned the digits briefly: accurate in trained order, poor in any other."""
    import torch

    from ls_edge.data.datasets import open_data
    from ls_edge.export.calibration import Preprocessor
    from ls_edge.training.runs.checkpoint import load_run

    def learn(view):
        from ls_edge.training.models.small_models import image_spec_of

        preprocess = Preprocessor(image_spec_of(view))
        refs = open_data("digits", "train").images
        images = torch.stack([torch.from_numpy(preprocess(ref.read(), ref.name)) for ref in refs])
        labels = torch.tensor([ref.label for ref in refs])
        generator = torch.Generator().manual_seed(0)
        with torch.enable_grad():
            for block in view.blocks:
                for parameter in block.parameters():
                    if parameter.ndim > 1:
                        parameter.data.mul_(0.6)
            optimizer = torch.optim.AdamW(view.parameters(), lr=3e-3)
            view.train()
            for _ in range(EPOCHS):
                for rows in torch.randperm(len(images), generator=generator).split(64):
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(view(images[rows]), labels[rows]).backward()
                    optimizer.step()
            view.eval()

    return load_run(made_once("trained", lambda folder: make_run(folder, change=learn, depth=6)))


@pytest.fixture(scope="session")
def run_folder(make_run, made_once):
    return made_once("run", make_run)


@pytest.fixture(scope="session")
def loaded(run_folder):
    from ls_edge.training.runs.checkpoint import load_run

    return load_run(run_folder)


@pytest.fixture(scope="session")
def exported(loaded, made_once):
    """Return the bundle, with ``whole.onnx``; tests that change files copy it."""
    from ls_edge.core.bundle import Bundle
    from ls_edge.export.settings import ExportSettings
    from ls_edge.export.writer import export_run

    return Bundle.open(made_once("exported", lambda folder: export_run(loaded, folder, ExportSettings(whole=True))))


@pytest.fixture
def copied(exported, tmp_path):
    """Return a copy of the bundle that a test may change."""
    import shutil

    from ls_edge.core.bundle import Bundle

    shutil.copytree(exported.folder, tmp_path / "bundle")
    return Bundle.open(tmp_path / "bundle")


@pytest.fixture(scope="session")
def traced(loaded):
    """Return the graphs of the run's blocks."""
    from ls_edge.export.targets import prepare_for_export
    from ls_edge.export.trace_onnx import trace_blocks

    return list(trace_blocks(prepare_for_export(loaded.view)))


@pytest.fixture(scope="session")
def few_images(loaded):
    """Return a calibration of 80 images."""
    from ls_edge.export.calibration import read_calibration

    return read_calibration("digits", loaded.record.image, loaded.record.classes, 80)
