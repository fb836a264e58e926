"""Models by timm's names, and the small ones of the project."""

import pytest

from ls_edge.core.errors import ModelError
from ls_edge.training.models.small_models import build, create


def test_unknown_names_suggest_near_ones():
    with pytest.raises(ModelError, match=r"unknown model 'vit_tiny_patch16_244'; did you mean .*vit_tiny_patch16_224"):
        create("vit_tiny_patch16_244")
    with pytest.raises(ModelError, match="did you mean vit_digits"):
        create("vit_digit")


def test_settings_and_weights_that_a_model_lacks_are_refused():
    with pytest.raises(ModelError, match="vit_digits cannot be built"):
        create("vit_digits", no_such_setting=1)
    with pytest.raises(ModelError, match="cannot get timm's pretrained weights of vit_digits"):
        create("vit_digits", pretrained=True)


def test_the_small_models_have_the_documented_sizes():
    digits, cifar = build("vit_digits", {}), build("vit_cifar", {})
    assert (digits.num_blocks, digits.image_size) == (8, (16, 16))
    assert (cifar.num_blocks, cifar.token_spec.dim, cifar.image_size) == (8, 192, (32, 32))
    assert 2.8e6 < sum(p.numel() for p in cifar.parameters()) < 2.9e6
    assert build("vit_cifar", {"img_size": 64}).image_size == (64, 64)
