"""Several seeds, evaluations of several runs, the figure, and a full disk."""

import json
import resource
import shutil
from pathlib import Path

import msgspec
import pytest

from ls_edge.api.training import other_setting, read_settings
from ls_edge.training.runs.checkpoint import load_run
from tests.training.commands import call

CONFIG = "model: {args: {embed_dim: 16, depth: 4, num_heads: 2, mlp_ratio: 2.0}}\nbatch_size: 256\nprecision: fp32\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeds")
    (folder / "train.yaml").write_text(CONFIG)
    for method, extra in (("predict", ["--seeds", 2, "--seed", 3]), ("sequential", [])):
        assert call("train", "--data", "digits", "--out", folder / method, "--config", folder / "train.yaml",
                    "--epochs", 1, "--method", method, *extra) == 0  # fmt: skip
    return folder


EVAL = ["--data", "digits", "--limit", 60, "--orders", 5, "--keep", "1,3"]


def test_each_seed_is_a_run(folder, capsys):
    runs = sorted(path.name for path in (folder / "predict").iterdir())
    assert runs == ["seed-3", "seed-4"]
    assert [load_run(folder / "predict" / name).config.seed for name in runs] == [3, 4]
    capsys.readouterr()
    assert call("train", "--out", folder / "predict", "--config", folder / "train.yaml", "--data", "digits", "--epochs",
                1, "--method", "predict", "--seeds", 2, "--seed", 3, "--resume", "--json") == 0  # fmt: skip
    said = capsys.readouterr()
    assert (said.err.count("is finished: nothing to resume"), json.loads(said.out)) == (2, {"runs": []})


def test_seeds_without_a_run_are_trained_like_the_resumed_ones(folder, tmp_path, capsys):
    shutil.copytree(folder / "predict", tmp_path / "runs")
    assert (
        call("train", "--out", tmp_path / "runs", "--seeds", 3, "--seed", 3, "--resume", "--set", "data.workers=0") == 0
    )
    assert capsys.readouterr().err.count("is finished: nothing to resume") == 2
    old, new = (load_run(tmp_path / "runs" / name) for name in ("seed-4", "seed-5"))
    assert [(one.config.data.workers, one.config.data.split_seed) for one in (old, new)] == [(None, 4), (0, 5)]
    expected = msgspec.structs.replace(old.config, seed=5, data=new.config.data, run=new.config.run)
    assert (new.config, new.record.model_args) == (expected, old.record.model_args)


def test_the_first_seed_needs_data(tmp_path, capsys):
    assert call("train", "--out", tmp_path / "runs", "--seeds", 2, "--resume") == 2
    assert capsys.readouterr().err.endswith("seed-0: give --data DATA, or name data.source in the --config file\n")


@pytest.mark.parametrize(
    "flags",
    [
        ["--method", "shared", "--init", "sequential", "--set", "method_args={adapter_rank: 2, exits: 0}"],
        ["--depth", 3, "--set", "data.exif_orientation=null", "--set", "method=null", "--set", "bands=null"],
    ],
)
def test_the_command_that_started_a_run_resumes_it(folder, tmp_path, capsys, monkeypatch, flags):
    """A run has more settings than were named, because those left open are filled in."""
    monkeypatch.chdir(folder)
    command = ["train", "--data", "digits", "--out", tmp_path / "run", "--epochs", 0, *flags]
    if "--init" not in flags:
        command += ["--config", "train.yaml"]
    assert call(*command) == 0
    capsys.readouterr()
    code = call(*command, "--resume")
    assert (code, capsys.readouterr().err.count("is finished: nothing to resume")) == (0, 1)


def test_a_run_resumes_with_another_name_of_its_images(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Path(__file__).parents[2] / "examples/cifar10"
    for source, differs in (("./cifar10/train.tar.xz", False), (str(tmp_path / "cifar10/train.tar.xz"), False),
                            ("other/train.tar.xz", True)):  # fmt: skip
        asked = read_settings(None, {"data": source}, (), resume=True, overwrite=False)
        assert bool(other_setting(run, *asked)) == differs, source


def test_a_run_is_not_resumed_with_another_setting_of_its_method(tmp_path, capsys):
    command = ["train", "--data", "digits", "--out", tmp_path / "run", "--epochs", 0, "--method", "layerdrop"]
    assert call(*command, "--set", "method_args.p=0.4") == 0
    capsys.readouterr()
    assert call(*command, "--set", "method_args.p=0.3", "--resume") == 2
    assert "where method_args is {'p': 0.4}, not {'p': 0.3}; leave it out" in capsys.readouterr().err


def test_a_folder_of_runs_is_evaluated_as_one(folder, capsys):
    documents = []
    for what in ("predict", "predict/seed-3", "predict/seed-4"):
        capsys.readouterr()
        assert call("eval", folder / what, *EVAL, "--json") == 0
        documents.append(json.loads(capsys.readouterr().out))
    both, one, other = documents
    for pick in (
        lambda d: d["sequential"]["top1"], lambda d: d["arbitrary"]["top1_mean"], lambda d: d["position_accuracy"],
        lambda d: d["kept"]["3"]["arbitrary"],
    ):  # fmt: skip
        assert pick(both) == pytest.approx((pick(one) + pick(other)) / 2)
    assert (both["models"]["count"], one["models"]) == (2, None)
    assert 0 < both["position_accuracy"] < 1


@pytest.mark.leaks_ok("vl-convert keeps the runtime that draws the first figure of a process")
def test_several_runs_are_one_document_and_one_figure(folder, capsys):
    capsys.readouterr()
    picture = folder / "figure.svg"
    assert call("eval", folder / "predict", folder / "sequential", *EVAL, "--figure", picture, "--json") == 0
    found = json.loads(capsys.readouterr().out)["evaluations"]
    assert [item["settings"]["method"] for item in found] == ["predict", "sequential"]
    text = picture.read_text()
    assert text.startswith("<svg")
    assert {"predict", "sequential", "blocks kept"} <= set(text.replace("<", ">").split(">"))
    assert call("eval", folder / "predict", *EVAL) == 0
    out = capsys.readouterr()
    for words in ("own slot", "1 of 4"):
        assert words in out.out
    assert "means over 2 models" in out.err


def test_a_full_disk_keeps_the_last_good_checkpoint(folder, tmp_path, capsys):
    weights = (folder / "sequential" / "model.safetensors").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * weights, before[1]))  # what is resumed from needs three times that
    try:
        code = call("train", "--data", "digits", "--out", tmp_path / "run", "--config", folder / "train.yaml",
                    "--method", "shuffle", "--epochs", 3)  # fmt: skip
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err
    assert code == 1
    assert "cannot write to" in said
    assert "Traceback" not in said
    assert load_run(tmp_path / "run").record.best_epoch == 1
