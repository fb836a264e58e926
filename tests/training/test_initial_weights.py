import argparse
import json
import os

import huggingface_hub
import pytest
import timm
import torch

from ls_edge.cli.main import main
from ls_edge.core.errors import ConfigError, ModelError, RunError, UsageError
from ls_edge.training.config import ModelConfig, RunRecord, TrainConfig, read_config
from ls_edge.training.models.small_models import build, create, image_spec_of
from ls_edge.training.runs.checkpoint import WEIGHTS, load_run, read_foreign, save_run, shown_model, write_tensors
from ls_edge.training.runs.initial_weights import make_initial_weights

SMALL = {"embed_dim": 16, "depth": 4, "num_heads": 2, "mlp_ratio": 2.0}
CLASSES = ("a", "b", "c")


def start(seed=0, classes=CLASSES, model_named=True, warn=lambda text: pytest.fail(text), **kwargs):
    config = ModelConfig(**{"name": "vit_digits", "args": SMALL, **kwargs})
    return make_initial_weights(config, classes, seed=seed, model_named=model_named, warn=warn)


def save(folder, made, classes=CLASSES, method="shuffle"):
    record = RunRecord(
        version="0", model=made.model, model_args=made.args, kept=made.kept, classes=classes, image=made.image,
        trained_on="abc", method=method,
    )  # fmt: skip
    save_run(folder, made.view, TrainConfig(), record)
    return folder


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_weights_follow_the_seed():
    assert same(start().view.weights(), start().view.weights())
    assert not same(start().view.weights(), start(seed=1).view.weights())


def test_a_run_round_trips(tmp_path):
    made = start(depth=2)
    run = load_run(save(tmp_path / "run", made))
    assert same(run.view.weights(), made.view.weights())
    assert (run.record.model, run.record.method, run.record.classes, run.record.trained_on) == (
        "vit_digits",
        "shuffle",
        CLASSES,
        "abc",
    )
    assert run.record.kept == (0, 3)
    assert run.record.image == made.image == image_spec_of(made.view)
    assert not run.view.training
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(run.view(images, [1, 0]), made.view.eval()(images, [1, 0]))


def test_saving_twice_gives_the_same_bytes(tmp_path):
    one, two = (save(tmp_path / name, start()) for name in "ab")
    assert (one / WEIGHTS).read_bytes() == (two / WEIGHTS).read_bytes()
    assert load_run(one).weights_sha256 == load_run(two).weights_sha256
    assert sorted(path.name for path in one.iterdir()) == ["config.yaml", "model.safetensors"]


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


def test_a_model_of_another_size_is_not_called_by_its_name_in_timm(tmp_path):
    usual = save(tmp_path / "usual", start(args={}))
    own = save(tmp_path / "own", start(name="vit_tiny_patch16_224", args={
        "img_size": 32, "patch_size": 4, "embed_dim": 128, "depth": 2, "num_heads": 4,
    }))  # fmt: skip
    shown = [shown_model(run.record, run.view) for run in map(load_run, (usual, own))]
    assert shown == ["vit_digits", "vit_65x128_depth2"]
    larger = load_run(save(tmp_path / "larger", start(args={}, img_size=32)))
    assert shown_model(larger.record, larger.view) == "vit_64x64_depth8"


def test_bands_of_a_run_are_inherited_and_shortened_with_it(tmp_path):
    made = start()
    record = RunRecord(
        version="0", model=made.model, model_args=made.args, kept=made.kept, classes=CLASSES, image=made.image,
        trained_on="abc", method="shuffle",
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


def test_other_classes_start_the_classifier_anew(tmp_path):
    made = start()
    run, told = save(tmp_path / "run", made), []
    again = start(init=str(run), classes=("x", "y"), warn=told.append)
    assert "classifier is reinitialized" in told[0]
    assert again.view.num_classes == 2
    assert torch.equal(again.view.weights()["blocks.0.mlp.fc1.weight"], made.view.weights()["blocks.0.mlp.fc1.weight"])


def test_init_at_another_size_resamples_positions(tmp_path):
    run = save(tmp_path / "run", start())
    again = start(init=str(run), img_size=32)
    assert again.view.token_spec.count == 64
    assert again.image.size == (32, 32)


@pytest.mark.parametrize("form", ["safetensors", "pth", "wrapped"])
def test_init_from_a_file(tmp_path, form):
    made = start()
    path = tmp_path / f"weights.{'safetensors' if form == 'safetensors' else 'pth'}"
    if form == "safetensors":
        write_tensors(path, made.view.weights())
    else:
        state = {f"module.{name}": value for name, value in made.view.weights().items()}
        torch.save({"state_dict": state, "epoch": 3} if form == "wrapped" else state, path)
    assert same(start(seed=3, init=str(path)).view.weights(), made.view.weights())


def test_a_checkpoint_that_is_none(tmp_path):
    class Evil:
        def __reduce__(self):
            return (exec, ("raise SystemExit(9)",))

    torch.save({"model": Evil()}, tmp_path / "evil.pth")
    namespace = {"model": {"a": torch.zeros(1)}, "args": argparse.Namespace(lr=1)}
    torch.save(namespace, tmp_path / "namespace.pth")
    (tmp_path / "pickle.pth").write_bytes(b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01a\x94K\x01s.")
    (tmp_path / "junk.pth").write_bytes(b"junk")
    (tmp_path / "cut.pth").write_bytes((tmp_path / "namespace.pth").read_bytes()[:300])
    for name, why in (
        ("evil", "it holds Python objects, such as exec"), ("namespace", "Python objects, such as argparse.Namespace"),
        ("pickle", "it holds something else"), ("junk", "it is truncated or another format"),
        ("cut", "it is truncated or another format"),
    ):  # fmt: skip
        with pytest.raises(RunError, match=f"not a checkpoint of plain tensors .*{why}") as caught:
            read_foreign(tmp_path / f"{name}.pth")
        assert "weights_only" not in str(caught.value)
        assert "trust" not in str(caught.value)
        assert "\n" not in str(caught.value)
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    with pytest.raises(RunError, match="is not a safetensors file"):
        start(init=str(tmp_path / "junk.safetensors"))
    with pytest.raises(RunError, match="neither a run folder nor a file"):
        start(init=str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"it has no config\.yaml"):
        start(init=str(tmp_path / "empty"))


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


def test_arguments_that_are_not_the_users_say_so(tmp_path):
    for args, words in (
        ({"num_classes": 7}, "num_classes is 7; leave it out: it is the number of classes"),
        ({"in_chans": 1}, "in_chans is 1; use 3 or leave it out: images are decoded to red, green and blue"),
        ({"global_pool": ""}, "global_pool is ''; use avg, token or another kind"),
        ({"pretrained": True}, "pretrained is True; use the key pretrained of the section model"),
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
    write_tensors(path, start(args={**SMALL, "embed_dim": 32}).view.weights())
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


def test_broken_runs(tmp_path):
    run = save(tmp_path / "run", start())
    with pytest.raises(RunError, match=r"is not a run: it has no config\.yaml"):
        load_run(tmp_path / "nowhere")
    raw = (run / WEIGHTS).read_bytes()
    (run / WEIGHTS).write_bytes(raw[:-100])
    with pytest.raises(RunError, match="is not a safetensors file"):
        load_run(run)
    (run / WEIGHTS).unlink()
    with pytest.raises(RunError, match=r"model.safetensors is missing"):
        load_run(run)
    save(run, start(args={**SMALL, "embed_dim": 32}))
    config = (run / "config.yaml").read_text().replace("embed_dim: 32", "embed_dim: 16")
    (run / "config.yaml").write_text(config)
    with pytest.raises(RunError, match="this model needs"):
        load_run(run)
    (run / "config.yaml").write_text("epochs: 3\n")
    with pytest.raises(RunError, match="no section 'run'"):
        load_run(run)


def test_unknown_names_suggest_near_ones():
    with pytest.raises(ModelError, match=r"unknown model 'vit_tiny_patch16_244'; did you mean .*vit_tiny_patch16_224"):
        create("vit_tiny_patch16_244")
    with pytest.raises(ModelError, match="did you mean vit_digits"):
        create("vit_digit")


def test_settings_that_a_model_lacks():
    with pytest.raises(ModelError, match="vit_digits cannot be built"):
        create("vit_digits", no_such_setting=1)
    with pytest.raises(ModelError, match="cannot get timm's pretrained weights of vit_digits"):
        create("vit_digits", pretrained=True)


def test_own_models():
    digits, cifar = build("vit_digits", {}), build("vit_cifar", {})
    assert (digits.num_blocks, digits.image_size) == (8, (16, 16))
    assert (cifar.num_blocks, cifar.token_spec.dim, cifar.image_size) == (8, 192, (32, 32))
    assert 2.8e6 < sum(p.numel() for p in cifar.parameters()) < 2.9e6
    assert build("vit_cifar", {"img_size": 64}).image_size == (64, 64)
