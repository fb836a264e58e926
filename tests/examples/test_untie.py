"""A model of shared blocks that is untied answers as before, and trains on."""

import subprocess
import sys
from pathlib import Path

import torch

from ls_edge.training.runs.checkpoint import load_run

FOLDER = Path(__file__).parents[2] / "examples" / "pretrained"


def test_untied_blocks_answer_like_the_shared_block_in_any_order_and_train_on(shared_runs, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    shared, untied, trained = (tmp_path / name for name in ("shared", "untied", "trained"))
    program = [sys.executable, "-m", "ls_edge", "train", "--data", "digits", "--device", "cpu"]
    for command in (
        [*program, "--init", shared_runs / "start", "--method", "shared", "--epochs", "0", "--out", shared],
        [sys.executable, FOLDER / "untie.py", shared, untied],
        [*program, "--init", untied, "--method", "untie:Untied", "--epochs", "1", "--out", trained],
    ):
        subprocess.run(command, check=True, timeout=90)
    one, other, after = (load_run(folder).view.eval() for folder in (shared, untied, trained))
    images = torch.randn(2, 3, *one.image_size)
    order = [3, 1, 0, 2]
    with torch.inference_mode():
        assert torch.equal(one(images), other(images, order))
        assert not torch.equal(after(images), after(images, order))
