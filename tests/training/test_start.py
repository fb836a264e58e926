import pytest
import timm
import torch

from ls_edge.errors import ModelError, RunError, UsageError
from ls_edge.training.checkpoint import WEIGHTS, load_run, read_foreign, save_run, write_tensors
from ls_edge.training.config import ModelConfig, RunRecord, TrainConfig
from ls_edge.training.models import build, create, image_spec_of
from ls_edge.training.start import make_start

SMALL = {"embed_dim": 16, "depth": 4, "num_heads": 2, "mlp_ratio": 2.0}
CLASSES = ("a", "b", "c")


def start(seed=0, classes=CLASSES, model_named=True, warn=lambda text: pytest.fail(text), **kwargs):
    config = ModelConfig(**{"name": "vit_digits", "args": SMALL, **kwargs})
    return make_start(config, classes, seed=seed, model_named=model_named, warn=warn)


def save(folder, made, classes=CLASSES):
    record = RunRecord(
        version="0", model=made.model, model_args=made.args, kept=made.kept, classes=classes, image=made.image,
        trained_on="abc", method="shuffle",
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
    assert (run.model, run.method, run.classes, run.trained_on) == ("vit_digits", "shuffle", CLASSES, "abc")
    assert run.record.kept == (0, 3)
    assert run.image == made.image == image_spec_of(made.view)
    assert not run.view.training
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(run.view(images, [1, 0]), made.view.eval()(images, [1, 0]))


def test_saving_twice_gives_the_same_bytes(tmp_path):
    one, two = (save(tmp_path / name, start()) for name in "ab")
    assert (one / WEIGHTS).read_bytes() == (two / WEIGHTS).read_bytes()
    assert load_run(one).weights_sha256 == load_run(two).weights_sha256
    assert sorted(path.name for path in one.iterdir()) == ["config.yaml", "model.safetensors"]


def test_init_from_a_run_brings_its_model_and_can_be_thinned(tmp_path):
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


def test_other_classes_start_the_classifier_anew(tmp_path):
    made = start()
    run, told = save(tmp_path / "run", made), []
    again = start(init=str(run), classes=("x", "y"), warn=told.append)
    assert "classifier starts anew" in told[0]
    assert again.view.classes_count == 2
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
    with pytest.raises(RunError, match="no checkpoint of plain tensors"):
        read_foreign(tmp_path / "evil.pth")
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    with pytest.raises(RunError, match="no safetensors file"):
        start(init=str(tmp_path / "junk.safetensors"))
    with pytest.raises(RunError, match="neither a run folder nor a file"):
        start(init=str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"it has no config\.yaml"):
        start(init=str(tmp_path / "empty"))


def test_a_checkpoint_of_another_model_is_one_line(tmp_path):
    path = tmp_path / "other.safetensors"
    write_tensors(path, start(args={**SMALL, "embed_dim": 32}).view.weights())
    with pytest.raises(
        ModelError, match=r"other.safetensors: the checkpoint's '.*' is \[.*\], this model needs"
    ) as caught:
        start(init=str(path), warn=lambda _: None)
    assert "\n" not in str(caught.value)
    write_tensors(path, timm.create_model("resnet18").state_dict())
    with pytest.raises(ModelError, match="it is of another model"):
        start(init=str(path))
    run = save(tmp_path / "run", start())
    with pytest.raises(UsageError, match="is a vit_digits, --model says vit_cifar"):
        start(init=str(run), name="vit_cifar", args={})
    with pytest.raises(UsageError, match="exclude each other"):
        start(init=str(run), pretrained=True)


def test_broken_runs(tmp_path):
    run = save(tmp_path / "run", start())
    with pytest.raises(RunError, match=r"is no run: it has no config\.yaml"):
        load_run(tmp_path / "nowhere")
    raw = (run / WEIGHTS).read_bytes()
    (run / WEIGHTS).write_bytes(raw[:-100])
    with pytest.raises(RunError, match="no safetensors file"):
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
    with pytest.raises(ModelError, match="unknown model 'hf-hub:timm/vit_tiny"):
        create("hf-hub:timm/vit_tiny_patch16_224")


def test_settings_that_a_model_lacks():
    with pytest.raises(ModelError, match="vit_digits cannot be built"):
        create("vit_digits", no_such_setting=1)
    with pytest.raises(ModelError, match="pretrained weights of vit_digits could not be had"):
        create("vit_digits", pretrained=True)


def test_own_models():
    digits, cifar = build("vit_digits", {}), build("vit_cifar", {})
    assert (digits.blocks_count, digits.image_size) == (8, (16, 16))
    assert (cifar.blocks_count, cifar.token_spec.dim, cifar.image_size) == (8, 192, (32, 32))
    assert 2.8e6 < sum(p.numel() for p in cifar.parameters()) < 2.9e6
    assert build("vit_cifar", {"img_size": 64}).image_size == (64, 64)
