"""``ls-edge train`` and ``ls-edge eval`` from the command line."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from ls_edge.core.bands import Bands
from ls_edge.training.config import find_recipe
from ls_edge.training.runs.checkpoint import load_run
from tests.training.commands import call

CONFIG = "model: {args: {embed_dim: 16, depth: 4, num_heads: 2, mlp_ratio: 2.0}}\nbatch_size: 128\nprecision: fp32\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    (folder / "train.yaml").write_text(CONFIG)
    assert call("train", "--data", "digits", "--out", folder / "run", "--config", folder / "train.yaml", "--epochs", 2,
                "--seed", 3) == 0  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def bundle(folder):
    assert call("export", folder / "run", "--out", folder / "bundle", "--per-block") == 0
    return folder / "bundle"


def images(path, classes=("0", "1"), count=3):
    for name in classes:
        (path / name).mkdir(parents=True)
        for index in range(count):
            Image.new("L", (8, 8), 40 * index).save(path / name / f"{index}.png")
    return path


def test_train_prints_a_summary_as_json(folder, capsys):
    arguments = ["--init", folder / "run", "--depth", 2, "--epochs", 0, "--json", "--overwrite"]
    assert call("train", "--data", "digits", "--out", folder / "thin", *arguments) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["blocks"], summary["epochs"], summary["best_epoch"]) == (2, 0, None)
    assert summary["settings"]["model"]["depth"] == 2
    assert load_run(folder / "thin").record.kept == (0, 3)


def test_scaling_and_crop_of_the_configuration_hold_wherever_the_model_is_used(folder, tmp_path, capsys):
    config = tmp_path / "crop.yaml"
    config.write_text(CONFIG + "data: {crop_pct: 0.5, interpolation: bilinear}\nepochs: 0\n")
    assert call("train", "--data", "digits", "--config", config, "--out", tmp_path / "run") == 0
    assert call("train", "--data", "digits", "--init", tmp_path / "run", "--epochs", 0, "--out", tmp_path / "heir") == 0
    for run in ("run", "heir"):
        image = load_run(tmp_path / run).record.image
        assert (image.crop_pct, image.interpolation) == (0.5, "bilinear")
    own = load_run(folder / "run").record.image
    assert (own.crop_pct, own.interpolation) == (1.0, "bicubic")
    config.write_text("data: {crop_pct: 0}\n")
    assert call("train", "--data", "digits", "--config", config, "--out", tmp_path / "no") == 2
    assert "crop_pct is 0; it has to be a number from 0.01 to 8" in capsys.readouterr().err


def test_the_configuration_of_a_run_repeats_it(folder, capsys):
    again = folder / "again"
    assert call("train", "--config", folder / "run" / "config.yaml", "--out", again) == 0
    assert (again / "model.safetensors").read_bytes() == (folder / "run" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("asked", "bands"),
    [
        ([], "0/1-6/7"),
        (["--bands", "0-7"], "0-7"),
        (["--method", "shuffle"], None),
        (["--set", "bands=[[0,1],[2,3,4,5,6,7]]"], "0-1/2-7"),
    ],
    ids=str,
)
def test_the_ends_keep_their_place_by_default_and_a_line_reports_it(asked, bands, tmp_path, capsys):
    """Other methods have full freedom."""
    assert call("train", "--data", "digits", "--epochs", 0, "--out", tmp_path / "run", *asked) == 0
    config = load_run(tmp_path / "run").config
    assert config.bands == (bands and Bands.from_json(bands).to_json())
    line = "bands 0/1-6/7: the first and the last block keep their place"
    err = capsys.readouterr().err
    assert (line in err, "--bands 0-7 trains any order" in err) == ((True, True) if not asked else (False, False))
    assert call("train", "--config", tmp_path / "run" / "config.yaml", "--out", tmp_path / "again") == 0
    assert load_run(tmp_path / "again").config == config


def test_bands_are_trained_recorded_inherited_and_evaluated(folder, tmp_path, capsys):
    options = ["--data", "digits", "--config", folder / "train.yaml", "--method", "shuffle", "--epochs", 1]
    assert call("train", *options, "--out", tmp_path / "run", "--bands", "0/1-2/3") == 0
    assert load_run(tmp_path / "run").config.bands == [[0], [1, 2], [3]]
    short = ["--data", "digits", "--epochs", 0, "--init", tmp_path / "run"]
    assert call("train", *short, "--out", tmp_path / "heir") == 0
    assert load_run(tmp_path / "heir").config.bands == [[0], [1, 2], [3]]
    assert call("train", *short, "--out", tmp_path / "free", "--bands", "0-3") == 0
    assert load_run(tmp_path / "free").config.bands == [[0, 1, 2, 3]]
    assert call("train", *short, "--out", tmp_path / "no", "--bands", "0/1") == 2
    assert "bands [[0], [1]] have blocks 0 to 1, the model has 0 to 3" in capsys.readouterr().err
    fast = ["--data", "digits", "--limit", 40, "--orders", 20, "--keep", "2"]
    assert call("eval", tmp_path / "run", *fast, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["settings"]["bands"] == [[0], [1, 2], [3]]
    assert call("eval", tmp_path / "run", *fast, "--json", "--bands", "0/1/2/3") == 0
    fixed = json.loads(capsys.readouterr().out)
    assert fixed["arbitrary"]["top1_mean"] == pytest.approx(fixed["sequential"]["top1"])
    assert fixed["sequential"] == document["sequential"]
    assert call("eval", tmp_path / "run", *fast) == 0
    assert "in the bands 0/1-2/3" in capsys.readouterr().out
    assert call("eval", tmp_path / "run", *fast, "--bands", "0/1") == 2
    assert call("eval", tmp_path, *fast) == 2
    assert "so there is no mean over them" in capsys.readouterr().err


@pytest.mark.release
def test_eval_of_a_run_and_of_its_bundle_agree(folder, bundle, capsys):
    capsys.readouterr()
    found = {}
    for what in (folder / "run", bundle):
        assert call("eval", what, "--data", "digits", "--limit", 120, "--orders", 6, "--keep", "1,3", "--json") == 0
        found[what] = json.loads(capsys.readouterr().out)
    run, bundle_ = found.values()
    assert set(run) >= {"sequential", "arbitrary", "kept", "position_accuracy", "images"}
    assert run["arbitrary"].keys() == {"top1_mean", "top1_std", "top1_p5", "top1_worst", "orders"}
    assert (run["images"], run["arbitrary"]["orders"], set(run["kept"])) == (120, 6, {"1", "3"})
    assert run["settings"]["engine"].startswith("torch")
    assert bundle_["settings"]["engine"].startswith("onnxruntime")
    for key in ("sequential", "arbitrary", "kept"):
        assert json.dumps(run[key], sort_keys=True) == json.dumps(bundle_[key], sort_keys=True)


@pytest.mark.processes
def test_eval_of_a_bundle_needs_no_torch(bundle):
    arguments = ["eval", str(bundle), "--data", "digits", "--limit", "5", "--orders", "2"]
    code = (
        "import sys\nfor name in ('torch', 'timm', 'onnx', 'torchvision'): sys.modules[name] = None\n"
        f"from ls_edge.cli.main import main\nmain({arguments!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "random order" in done.stdout


def test_eval_warns_of_training_data_and_bad_images(folder, tmp_path, capsys):
    data = images(tmp_path / "data")
    (data / "0" / "bad.png").write_bytes(b"no image")
    arguments = ["--config", folder / "train.yaml", "--batch-size", 2, "--epochs", 1]
    assert call("train", "--data", data, "--out", tmp_path / "run", *arguments) == 0
    capsys.readouterr()
    assert call("eval", tmp_path / "run", "--data", data, "--orders", 2, "--json") == 0
    captured = capsys.readouterr()
    assert "the model was trained on 3 of the 4 different images" in captured.err
    assert "0/bad.png" in captured.err
    found = json.loads(captured.out)
    assert (found["images"], found["skipped"]) == (6, 1)


def test_eval_matches_classes_by_name(folder, tmp_path, capsys):
    assert call("eval", folder / "run", "--data", images(tmp_path / "some", ("3", "7")), "--orders", 1) == 0
    assert call("eval", folder / "run", "--data", images(tmp_path / "other", ("3", "zebra"))) == 1
    assert "the model has no class 'zebra'" in capsys.readouterr().err
    (tmp_path / "flat").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "flat" / "0.png")
    assert call("eval", folder / "run", "--data", tmp_path / "flat") == 1
    assert "no class folders" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["train", "--out", "{tmp}/x"], 2, "no data"),
        (["train", "--out", "{tmp}/y", "--data", "{photos}"], 2, "no model: only 'digits' has a default one"),
        (["train", "--out", "{tmp}/x", "--data", "digits", "--model", "vit_tinny"], 2, "did you mean"),
        (["train", "--out", "{tmp}/x", "--data", "digits", "--depth", "9"], 2, "depth 9 is not possible"),
        (["train", "--out", "{tmp}/x", "--data", "digits", "--method", "shufle"], 2, "shufle"),
        (["train", "--out", "{run}", "--data", "digits"], 1, "already holds a run"),
        (["train", "--out", "{tmp}/x", "--resume"], 1, "is not a run"),
        (["train", "--out", "{run}", "--resume", "--epochs", "9"], 2, "epochs is 2, not 9"),
        (["train", "--out", "{tmp}/x", "--data", "digits", "--lr", "-1"], 2, "'--lr': -1.0 is not in the range"),
        (["eval", "{run}", "--data", "digits", "--keep", "5"], 2, "keep 5 is not possible"),
        (["eval", "{run}", "--data", "digits", "--keep", "a"], 2, "not a list of numbers"),
    ],
)
def test_errors_of_train_and_eval_are_one_line(folder, tmp_path, capsys, arguments, code, words):
    photos = images(folder / f"photos {len(arguments)} {words[:9]}")
    filled = [part.format(tmp=tmp_path, run=folder / "run", photos=photos) for part in arguments]
    assert call(*filled) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.count("\n") == 1


def test_too_little_memory_is_one_line_with_advice(tmp_path, capsys, faulty):
    """CUDA's allocator fails in a step; the CPU's refuses 500 GB."""

    def cuda(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    arguments = [
        "--set",
        "model.args={embed_dim: 16, depth: 1, num_heads: 2}",
        "--batch-size",
        32,
        "--set",
        "accumulate=2",
    ]

    def busy(*_):
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")

    for fault in (cuda, busy, lambda *_: torch.empty(125_000_000_000)):
        faulty.fault = staticmethod(fault)
        train = ["train", "--data", "digits", "--model", "vit_faulty", "--out", tmp_path / "x", "--overwrite"]
        assert call(*train, *arguments) == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert "out of memory on cpu with 32 images per step in 2 parts" in error
        assert "--accumulate 4" in error


def test_the_configuration_of_a_run_names_the_model_of_its_start(folder, tmp_path):
    train = ["train", "--data", "digits", "--epochs", 0, "--out"]
    small = ["--model", "vit_cifar", "--set", "model.args={depth: 1, embed_dim: 24, num_heads: 2}"]
    assert call(*train, tmp_path / "start", *small) == 0
    assert call(*train, tmp_path / "run", "--init", tmp_path / "start") == 0
    assert load_run(tmp_path / "run").config.model.name == "vit_cifar"
    assert call("train", "--config", tmp_path / "run" / "config.yaml", "--out", tmp_path / "again") == 0


def test_recipes_are_listed_with_their_files(capsys):
    assert call("train", "--recipes") == 0
    listed = capsys.readouterr().out
    (path,) = re.findall(r"^vit_b_cifar100 +ViT-B/16 on CIFAR-100, LayerShuffle\.  (.*)$", listed, re.M)
    assert Path(path).samefile(find_recipe(Path("vit_b_cifar100")))
