"""Checkpoints of other trainers: wrapped, prefixed, averaged, with settings, of autoencoders and of other sizes."""

import argparse
import re

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ls_edge.core.errors import ModelError, RunError
from ls_edge.training.runs.checkpoint import load_run
from ls_edge.training.runs.foreign_checkpoint import read_foreign
from tests.training.runs.starts import TINY, same, save, start


def weights(seed=3):
    return start(seed).view.weights()


def prefixed(found, prefix):
    return {prefix + name: tensor for name, tensor in found.items()}


@pytest.mark.parametrize(
    ("prefix", "keys"),
    [
        ("", ()),
        ("module.", ("state_dict",)),
        ("model.module._orig_mod.", ("model", "state_dict")),
        ("model.encoder.", ()),
        ("visual.trunk.", ("model",)),
    ],
)
def test_prefixes_and_dictionaries_in_any_nesting_are_removed(tmp_path, prefix, keys):
    path, value = tmp_path / "w.pth", prefixed(weights(), prefix)
    for key in reversed(keys):
        value = {key: value, "epoch": 7, "optimizer": {"lr": 0.1}}
    torch.save(value, path)
    made = start(seed=0, init=str(path))
    assert same(made.view.weights(), weights())
    assert made.trained
    torch.save({"checkpoint_of_mine": value}, path)
    with pytest.raises(RunError, match="does not hold a dictionary of dense tensors"):
        read_foreign(path)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (Tensor.to_sparse, "sparse_coo"),
        (lambda value: value.to("meta"), "meta"),
        (Tensor.tolist, "list"),
    ],
)
def test_what_is_not_a_dense_tensor_is_named(tmp_path, change, kind):
    path, name = tmp_path / "w.pth", "module.blocks.1.mlp.fc1.weight"
    value = prefixed(weights(), "module.")
    torch.save({"state_dict": {**value, name: change(value[name])}}, path)
    with pytest.raises(RunError, match=rf"w.pth does not hold a dictionary of dense tensors \('{name}' is {kind}\)"):
        read_foreign(path)


@pytest.mark.parametrize("wrapper", ["_orig_mod", "_checkpoint_wrapped_module"])
def test_wrappers_that_torch_puts_around_single_blocks_are_removed(tmp_path, wrapper):
    path = tmp_path / "w.pth"
    torch.save({re.sub(r"^(blocks\.\d\.)", rf"\1{wrapper}.", name): w for name, w in weights().items()}, path)
    assert same(start(init=str(path)).view.weights(), weights())


@pytest.mark.parametrize("name", ["w.SAFETENSORS", "weights"])
def test_the_content_of_a_file_and_not_its_name_tells_its_format(tmp_path, name):
    path = tmp_path / name
    for write in (torch.save, save_file):
        write(weights(), path)
        assert same(start(init=str(path)).view.weights(), weights())
    for content in (
        b"",
        b"version https://git-lfs.github.com/spec/v1\n",
        b'{"weight_map": {}}',
        b"\x08\x0a\x12\x07pytorch",
    ):
        path.write_bytes(content)
        with pytest.raises(RunError, match="is neither a safetensors file nor one of torch") as caught:
            start(init=str(path))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("average", ["state_dict_ema", "model_ema", "teacher"])
def test_averaged_weights_are_preferred_with_a_line(tmp_path, average):
    path, notes = tmp_path / "w.pth", []
    torch.save({"state_dict": weights(1), "model": weights(1), "student": weights(1), average: weights(2)}, path)
    assert same(start(init=str(path), warn=notes.append).view.weights(), weights(2))
    assert notes == [f"{path}: the averaged weights ({average}) are used"]
    torch.save({"model": weights(1), "teacher": weights(2)}, path)  # of a distillation
    assert same(start(init=str(path)).view.weights(), weights(1))
    torch.save({"teacher": prefixed(weights(2), "backbone.")}, path)  # what DINOv2 evaluates
    assert same(start(init=str(path), warn=notes.append).view.weights(), weights(2))


def test_lightning_has_raw_and_averaged_weights_in_one_dictionary(tmp_path):
    path, notes = tmp_path / "w.ckpt", []
    state = {**prefixed(weights(1), "model."), "criterion.weight": torch.ones(3)}
    torch.save({"state_dict": state, "hyper_parameters": {"lr": 0.1}}, path)
    assert same(start(init=str(path), warn=notes.append).view.weights(), weights(1))
    torch.save({"state_dict": {**state, **prefixed(weights(2), "ema_model.module.")}}, path)
    assert same(start(init=str(path), warn=notes.append).view.weights(), weights(2))
    assert notes[0] == f"{path}: the model's weights (model.*) are used, not the 1 of other names"
    assert notes[1].startswith(f"{path}: the averaged weights (ema_model.*) are used, ")


def test_images_are_prepared_as_the_settings_of_a_file_say(tmp_path):
    """Other means would give other answers without a word; a null or random value leaves that of the model."""
    path, notes, usual = tmp_path / "w.pth", [], start().image
    stated = {"mean": [0.1, 0.2, 0.3], "std": [0.4], "crop_pct": 0.8, "interpolation": "bilinear"}
    torch.save({"state_dict": weights(), "args": argparse.Namespace(**stated)}, path)
    found = start(init=str(path), warn=notes.append).image
    assert found == msgspec.structs.replace(usual, **stated | {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.4, 0.4)})
    said = "mean (0.1, 0.2, 0.3), std (0.4, 0.4, 0.4), interpolation bilinear, crop_pct 0.8"
    assert notes == [f"{path}: images are prepared as its settings say, not as usual for vit_digits: {said}"]
    left = {"mean": None, "std": [0.5, 0.5, 0.5], "crop_pct": None, "interpolation": "random", "input_size": None}
    torch.save({"state_dict": weights(), "args": argparse.Namespace(**left)}, path)
    assert start(init=str(path)).image == usual


def test_patches_of_another_size_are_mentioned(tmp_path):
    path, notes = tmp_path / "w.pth", []
    torch.save(start(args={**TINY, "img_size": 32, "patch_size": 8}).view.weights(), path)
    start(init=str(path), warn=notes.append)
    words = "are resampled, and answers are worse until it is trained; or: --set model.args.patch_size=8"
    assert notes == [f"{path} has patches of 8 x 8 pixels and vit_digits of 4 x 4, so they {words}"]


def test_the_decoder_of_an_autoencoder_and_the_head_of_dino_are_left_out(tmp_path):
    encoder = {name: tensor for name, tensor in weights().items() if not name.startswith("head.")}
    path, notes = tmp_path / "mae.pth", []
    torch.save({"model": {**encoder, "mask_token": torch.zeros(1, 1, 8), "decoder_embed.weight": torch.ones(2)}}, path)
    made = start(init=str(path), warn=notes.append)
    assert same({name: made.view.weights()[name] for name in encoder}, encoder)
    assert not made.trained
    assert notes == [f"{path}: the decoder of the autoencoder is left out"]
    path = tmp_path / "dino.pth"
    dino = {**prefixed(encoder, "module.backbone."), "module.head.mlp.0.weight": torch.ones(5, 5)}
    torch.save({"student": prefixed(weights(1), "module.backbone."), "teacher": dino}, path)
    made = start(init=str(path), warn=notes.append)
    assert same({name: made.view.weights()[name] for name in encoder}, encoder)


def test_names_of_another_library_are_mentioned(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({"vit.embeddings.cls_token": torch.ones(1, 1, 16), "classifier.bias": torch.ones(3)}, path)
    with pytest.raises(
        ModelError, match=r"names, such as '(vit|classifier)\..*', is in this model; .* needs timm's names"
    ):
        start(init=str(path))


def test_the_image_size_of_a_run_matches_its_model(tmp_path):
    run = save(tmp_path / "run", start())
    made = start(init=str(run), model_named=False, args={"img_size": 32})
    assert made.image.size == made.view.image_size == (32, 32)
    assert load_run(save(tmp_path / "larger", made)).record.image.size == (32, 32)


def test_dinov2_with_registers_is_read_as_its_authors_published_it(tmp_path):
    """They count a position for the class token but none for the registers."""
    name, args, path = (
        "vit_small_patch14_reg4_dinov2",
        {"embed_dim": 24, "num_heads": 2, "depth": 1},
        tmp_path / "w.pth",
    )
    state = start(name=name, args={**args, "img_size": 28}).view.weights()
    state = {key: value for key, value in state.items() if not key.startswith("head.")}
    state["register_tokens"] = state.pop("reg_token")
    state["pos_embed"] = torch.cat([torch.ones(1, 1, 24), state["pos_embed"]], 1)
    torch.save({**state, "mask_token": torch.zeros(1, 24)}, path)
    found = start(name=name, args={**args, "img_size": 42}, init=str(path)).view.weights()
    assert torch.equal(found["cls_token"], state["cls_token"] + 1)
    assert torch.equal(found["reg_token"], state["register_tokens"])
    assert found["pos_embed"].shape[1] == 9


def test_a_token_that_only_one_side_has_is_named(tmp_path):
    path, args = tmp_path / "w.pth", {"embed_dim": 24, "num_heads": 2, "depth": 1, "img_size": 32}
    names = ("deit_tiny_distilled_patch16_224", "vit_tiny_patch16_224")
    for own, other, how in (
        (*names, "has 'dist_token'"),
        (*names[::-1], "lacks 'dist_token'"),
        ("vit_small_patch14_reg4_dinov2", "vit_small_patch14_dinov2", "has 'reg_token'"),
    ):
        torch.save(start(name=own, args=args).view.weights(), path)
        with pytest.raises(ModelError, match=f"the checkpoint {how}, which this model"):
            start(name=other, args=args, init=str(path))


def wide_weights(size):
    """Return weights for images of a size, whose positions rise from left to right."""
    made = start(args={**TINY, "class_token": True, "img_size": size})
    height, width = (side // 4 for side in size)
    with torch.no_grad():
        made.view.model.pos_embed[0, 1:] = torch.arange(float(width)).expand(height, width).reshape(-1, 1)
    return made.view.weights()


@pytest.mark.parametrize("new", [(32, 16), (64, 64)])
def test_positions_of_a_file_are_resampled_if_it_says_its_image_size(tmp_path, new):
    path, args = tmp_path / "w.pth", {**TINY, "class_token": True, "img_size": new}
    for size in ({"input_size": [3, 16, 32], "img_size": None}, {"img_size": (16, 32)}):
        torch.save({"state_dict": wide_weights((16, 32)), "args": argparse.Namespace(**size)}, path)
        made = start(init=str(path), args=args)
        rows = made.view.model.pos_embed[0, 1:, 0].reshape(new[0] // 4, new[1] // 4)
        assert (rows - rows[0]).abs().max() < 1e-3
        assert (rows[0].diff() > 0).all()


def test_positions_of_an_unknown_grid_that_is_not_square_are_refused_or_mentioned(tmp_path):
    path, notes = tmp_path / "w.pth", []
    torch.save(wide_weights((16, 24)), path)
    with pytest.raises(ModelError, match=r"neither square nor this model's.*img_size=\[HEIGHT,WIDTH\] --epochs 0"):
        start(init=str(path), args={**TINY, "class_token": True, "img_size": 32})
    same_grid = start(init=str(path), args={**TINY, "class_token": True, "img_size": (16, 24)}, warn=notes.append)
    assert same(same_grid.view.weights(), wide_weights((16, 24)))
    assert notes == [f"{path} does not say its image size; if it is not 16 x 24, positions are mixed up"]
