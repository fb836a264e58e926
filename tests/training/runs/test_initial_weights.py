"""Initial weights: from the seed, a run, a file, or timm."""

import json
import os

import huggingface_hub
import pytest
import timm
import torch

from ls_edge.cli.main import main
from ls_edge.core.errors import ConfigError, ModelError, RunError, UsageError
from ls_edge.training.config import (
    RunRecord,
    TrainConfig,
    read_config,
)
from ls_edge.training.models.small_models import build
from ls_edge.training.runs.checkpoint import load_run, save_run, write_tensors
from tests.training.runs.starts import CLASSES, TINY, same, save, start


def test_weights_follow_the_seed():
    assert same(start().view.weights(), start().view.weights())
    assert not same(start().view.weights(), start(seed=1).view.weights())


def test_init_from_a_run_brings_its_model_and_can_be_shortened(tmp_path):
    made = start()
    run = save(tmp_path / "run", made)
    again = start(seed=5, init=str(run), name="vit_cifar", model_named=False, args={})
    assert again.model == "vit_digits"
    assert same(again.view.weights(), made.view.weights())
    thin = start(init=str(run), depth=2, args={})
    assert thin.kept == (0, 3)
    assert torch.equal(thin.view.weights()["blocks.1.mlp.fc1.weight"], made.view.weights()["blocks.3.mlp.fc1.weight"])
    thinner = start(init=str(save(tmp_path / "thin", thin)), depth=1, args={})
    assert thinner.kept == (0,)


@pytest.mark.parametrize(("model", "depth"), [("vit_digits", "depth"), ("mixer_cifar", "num_blocks")])
def test_a_file_of_another_depth_names_the_setting(tmp_path, model, depth):
    torch.save(build(model, {depth: 2}).weights(), tmp_path / "own.pth")
    with pytest.raises(ModelError, match=rf"own.pth has 2 blocks, {model} has 3: --set model.args.{depth}=2$"):
        start(init=str(tmp_path / "own.pth"), name=model, args={depth: 3})


def test_bands_of_a_run_are_inherited_and_shortened_with_it(tmp_path):
    made = start()
    record = RunRecord(
        version="0", model=made.model, model_args=made.args, kept=made.kept, classes=CLASSES, image=made.image,
        trained_on="", method="shuffle", best_epoch=1,
    )  # fmt: skip
    save_run(tmp_path / "run", made.view, TrainConfig(bands=[[0], [1, 2], [3]]), record)
    assert load_run(tmp_path / "run").bands.to_json() == [[0], [1, 2], [3]]
    assert start(init=str(tmp_path / "run"), model_named=False).bands.to_json() == [[0], [1, 2], [3]]
    assert start(init=str(tmp_path / "run"), model_named=False, depth=2).bands.to_json() == [[0], [1]]
    assert start(init=str(save(tmp_path / "free", made)), model_named=False).bands.to_json() == [[0, 1, 2, 3]]
    ordered = save(tmp_path / "ordered", made, method="sequential")
    assert start(init=str(ordered), model_named=False).bands is None  # it was trained in one order, which says nothing
    save_run(tmp_path / "wrong", made.view, TrainConfig(bands=[[0], [1, 2]]), record)
    with pytest.raises(RunError, match=r"wrong: bands .* the model has 0 to 3"):
        load_run(tmp_path / "wrong")


def test_other_classes_reinitialize_the_classifier(tmp_path):
    made = start()
    run, told = save(tmp_path / "run", made), []
    again = start(init=str(run), classes=("x", "y"), warn=told.append)
    assert "classifier is reinitialized" in told[0]
    assert again.view.num_classes == 2
    assert torch.equal(again.view.weights()["blocks.0.mlp.fc1.weight"], made.view.weights()["blocks.0.mlp.fc1.weight"])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"depth": 5}, "depth is 5, but --init .* in which it is 4; leave it out, or keep fewer .* with --depth$"),
        ({"num_heads": 4}, "num_heads is 4, but --init .* in which it is 2; leave it out$"),
        ({"init_values": 1.0}, "init_values is 1.0, but --init .* in which it is the model's default; leave it out$"),
    ],
)
def test_arguments_that_contradict_a_run_are_refused(tmp_path, args, words):
    """Its weights would fit, but compute something else or ignore the argument."""
    run = str(save(tmp_path / "run", start()))
    with pytest.raises(UsageError, match=rf"^model\.args\.{words}"):
        start(init=run, args=args)
    assert start(init=run, args={**TINY, "drop_path_rate": 0.1, "img_size": 16}).args["drop_path_rate"] == 0.1


@pytest.mark.filterwarnings("ignore")  # the hub's own
def test_pretrained_weights_without_a_network_are_one_line(tmp_path, monkeypatch, capsys):
    for name in [name for name in os.environ if "proxy" in name.lower()]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "https://hub.invalid")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(SystemExit) as ended:
        main(["train", "--data", "digits", "--epochs", "0", "--model", "vit_tiny_patch16_224", "--pretrained",
              "--out", str(tmp_path / "run")])  # fmt: skip
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert "hub.invalid cannot be reached, and the weights are not in its cache; give a file with --init" in printed.err
    assert printed.out == ""
    assert not (tmp_path / "run").exists()
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


def test_arguments_that_follow_from_the_data_are_refused(tmp_path):
    for args, words in (
        ({"num_classes": 7}, "num_classes is 7; leave it out: it is the number of classes"),
        ({"in_chans": 1}, "in_chans is 1; use 3 or leave it out: images are decoded to red, green and blue"),
        ({"global_pool": ""}, "global_pool is ''; use avg, token or another kind"),
        ({"pretrained": True}, "pretrained is true; use the key pretrained of the section model"),
        ({"name": "vit_cifar"}, "name is 'vit_cifar'; use the key name of the section model"),
        ({"checkpoint_path": "w.pth"}, "checkpoint_path is 'w.pth'; use the key init of the section model"),
        ({"device": "meta"}, "device is 'meta'; use the key device of the configuration"),
        ({"drop_path_rate": 2}, "drop_path_rate is 2; use a number from 0 to 1"),
        ({"drop_path_rate": -0.1}, "drop_path_rate is -0.1; use a number from 0 to 1"),
        ({"drop_path_rate": "high"}, "drop_path_rate is 'high'; use a number from 0 to 1"),
    ):  # fmt: skip
        (tmp_path / "train.yaml").write_text(json.dumps({"model": {"args": args}}))
        with pytest.raises(ConfigError, match=rf"train\.yaml:1:\d+: {words}"):
            read_config(tmp_path / "train.yaml", {"data": "digits"})
    (tmp_path / "train.yaml").write_text("model: {args: {in_chans: 3, global_pool: avg}}")
    assert read_config(tmp_path / "train.yaml", {})[0].model.args == {"in_chans": 3, "global_pool": "avg"}
    with pytest.raises(ModelError, match=r"returns \[1, 16, 10\] for an image instead of one row of logits"):
        build("vit_digits", {"global_pool": ""})


def test_a_checkpoint_of_another_model_is_one_line(tmp_path):
    path = tmp_path / "other.safetensors"
    write_tensors(path, start(args={**TINY, "embed_dim": 32}).view.weights())
    with pytest.raises(
        ModelError, match=r"other.safetensors: '.*' is \[.*\] in the checkpoint, this model needs"
    ) as caught:
        start(init=str(path), warn=lambda _: None)
    assert "\n" not in str(caught.value)
    write_tensors(path, timm.create_model("resnet18").state_dict())
    with pytest.raises(ModelError, match="it belongs to another model"):
        start(init=str(path))
    run = save(tmp_path / "run", start())
    with pytest.raises(UsageError, match="is a vit_digits, --model is vit_cifar"):
        start(init=str(run), name="vit_cifar", args={})
    with pytest.raises(UsageError, match="exclude each other"):
        start(init=str(run), pretrained=True)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda value: value / 0.0, "has NaN or infinity in the checkpoint"),
        (lambda value: (10 * value).to(torch.int8), "is int8 in the checkpoint; save weights that are not quantized"),
        (lambda value: value.to(torch.complex64), "is complex64 in the checkpoint"),
    ],
)
def test_weights_without_a_meaning_are_refused(tmp_path, change, problem):
    """torch would load them, and a model of NaN answers every image with the first class."""
    path, name = tmp_path / "odd.safetensors", "blocks.1.mlp.fc1.weight"
    good = start()
    weights = good.view.weights()
    write_tensors(path, {**weights, name: change(weights[name])})
    with pytest.raises(ModelError, match=f"odd.safetensors: '{name}' {problem}"):
        start(init=str(path))
    run = save(tmp_path / "run", good)
    write_tensors(run / "model.safetensors", {**weights, name: change(weights[name])})
    with pytest.raises(RunError, match=f"run: '{name}' {problem}"):
        load_run(run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_of_another_precision_are_converted(tmp_path, dtype):
    path, weights = tmp_path / "odd.safetensors", start().view.weights()
    write_tensors(path, {name: value.to(dtype) for name, value in weights.items()})
    found = start(init=str(path)).view.weights()
    assert all(torch.equal(found[name], value.to(dtype).float()) for name, value in weights.items())
