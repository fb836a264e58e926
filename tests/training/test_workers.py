"""Decoding processes: without shared memory, killed, and of another number after a resume."""

import functools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ls_edge
from ls_edge.core.errors import TrainingStopped
from ls_edge.device import hardware
from ls_edge.training.loop import train
from tests.training import trainings
from tests.training.colors import write_colors
from tests.training.trainings import Silent, Stops, metrics, weights

pytestmark = pytest.mark.processes
settings = functools.partial(trainings.settings, batch_size=16, args={"depth": 1})
DECODED = ["data.cache_mb=0", "data.augment=timm"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return str(write_colors(tmp_path_factory.mktemp("workers") / "data", 24))


def test_a_run_resumes_to_the_same_result_on_other_hardware_and_with_other_decoding_processes(
    data, tmp_path, monkeypatch
):
    alone = settings(data, changes=[*DECODED, "data.workers=0"], precision="auto")
    train(alone, tmp_path / "whole", reporter=Silent())
    with pytest.raises(KeyboardInterrupt):
        train(alone, tmp_path / "broken", reporter=Stops())
    other = not hardware.multiplies_bfloat16()
    monkeypatch.setattr(hardware, "multiplies_bfloat16", lambda: other)
    ls_edge.train(out=tmp_path / "broken", resume=True, changes=["data.workers=1"], precision="auto")
    assert weights(tmp_path / "broken") == weights(tmp_path / "whole")
    assert metrics(tmp_path / "broken") == metrics(tmp_path / "whole")


def test_a_killed_decoding_process_ends_training_in_one_line_that_names_resume(data, tmp_path):
    """Torch reports it in a signal handler, so training may be anywhere."""

    class Kills(Silent):
        def advance(self, loss=None):
            for child in map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()):
                if self.epochs and Path(f"/proc/{child}/cmdline").read_bytes() == own:  # a fork of this process
                    os.kill(child, signal.SIGKILL)
                    signal.sigtimedwait({signal.SIGUSR1}, 10)  # until the handler of SIGCHLD raises

    own = Path("/proc/self/cmdline").read_bytes()
    config = settings(data, epochs=2, changes=[*DECODED, "data.workers=1"])
    with pytest.raises(TrainingStopped, match=r"a decoding process has ended .*; continue with --resume") as caught:
        train(config, tmp_path / "run", reporter=Kills())
    assert "\n" not in str(caught.value)
    assert (tmp_path / "run" / "resume.safetensors").exists()


@pytest.mark.release
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare")
def test_a_small_shared_memory_is_enough(data, tmp_path):
    """As in a container, which has 64 MB; batches of 48 images of 224 pixels have 7 MB, this place has 1 MB."""
    command = [sys.executable, "-m", "ls_edge", "train", "--data", data, "--out", str(tmp_path / "run"), "--model",
               "vit_tiny_patch16_224", "--set", "model.args={depth: 1, embed_dim: 24, num_heads: 2}", "--epochs", "1",
               "--batch-size", "48", "--method", "sequential", "--set", "data.workers=1"]  # fmt: skip
    script = 'mount -t tmpfs -o size=1M tmpfs /dev/shm && exec "$@"'
    done = subprocess.run(["unshare", "--mount", "sh", "-c", script, "sh", *command], capture_output=True, text=True,
                          timeout=170)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "epoch 1 of 1" in done.stdout
