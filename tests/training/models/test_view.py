"""Views of models: orders, kept blocks, weights, and compiled blocks."""

import pytest
import timm
import torch

from ls_edge.core.errors import ModelError
from ls_edge.training.models.families import evenly_spaced
from ls_edge.training.models.small_models import create
from ls_edge.training.models.view import BlockView
from tests.arrangements import arrangement_of

torch.set_num_threads(1)
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2, "num_classes": 5}


def tiny(**kwargs):
    torch.manual_seed(0)
    model = timm.models.vision_transformer.VisionTransformer(**{**SMALL, **kwargs})
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"reg_tokens": 4, "no_embed_class": True},
        {"pre_norm": True, "pos_embed": "none"},
        {"init_values": 0.1, "qk_norm": True},
        {"class_token": False, "global_pool": "map"},
        {"patch_drop_rate": 0.5},
    ],
    ids=str,
)
def test_trained_order_is_timms_forward(kwargs):
    model = tiny(**kwargs)
    view = BlockView(model)
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(view(images), model(images))
        assert torch.equal(view(images, [0, 1, 2, 3]), model(images))
        assert not torch.equal(view(images, [3, 2, 1, 0]), model(images))
        tokens = view.stem(images)
    assert tokens.shape == (3, view.token_spec.count, view.token_spec.dim)
    assert (view.num_blocks, len(view.blocks), view.needs_slot, view.num_classes) == (4, 4, False, 5)


def test_orders_and_tracks_run_their_blocks():
    view = BlockView(tiny())
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        tokens = view.stem(images)
        by_hand = view.blocks[1](view.blocks[3](tokens))
        assert torch.equal(view(images, [3, 1]), view.head(by_hand))
        side_by_side = tokens + (view.blocks[2](tokens) - tokens)
        side_by_side = side_by_side + (by_hand - tokens)
        found = view(images, arrangement_of([[[2], [3, 1]]]))
    torch.testing.assert_close(found, view.head(side_by_side))


def test_kept_blocks_are_evenly_spaced():
    assert evenly_spaced(12, 3) == (0, 6, 11)
    assert evenly_spaced(12, 12) == tuple(range(12))
    assert evenly_spaced(8, 1) == (0,)
    for keep in range(1, 13):
        assert len(set(evenly_spaced(12, keep))) == keep
    view = BlockView(tiny())
    last = view.blocks[3]
    view.keep_blocks(evenly_spaced(4, 2))
    assert view.num_blocks == 2
    assert view.blocks[1] is last
    with pytest.raises(ModelError, match="depth 3 is not possible; use 1 to 2, the number of blocks"):
        view.keep_blocks(evenly_spaced(2, 3))


def test_blocks_of_other_shape_are_refused():
    model = tiny()
    model.blocks[2] = tiny(mlp_ratio=2.0).blocks[2]
    with pytest.raises(ModelError, match="the parameters of block 2 differ from block 0"):
        BlockView(model)


def test_a_block_that_the_model_lacks_is_refused():
    with pytest.raises(ModelError, match="blocks 0 to 3"):
        BlockView(tiny())(torch.zeros(1, 3, 32, 32), [0, 4])


def test_weights_have_timms_names_and_are_checked():
    view = BlockView(tiny())
    weights = view.weights()
    assert "blocks.0.attn.qkv.weight" in weights
    other = BlockView(tiny())
    other.load_weights({name: value + 1 for name, value in weights.items()})
    with pytest.raises(ModelError, match=r"lacks 'norm.weight'"):
        other.load_weights({k: v for k, v in weights.items() if k != "norm.weight"})
    with pytest.raises(ModelError, match=r"'pos_embed' is \[1, 2\] in the checkpoint, this model needs \[1, 17, 32\]"):
        other.load_weights({**weights, "pos_embed": torch.zeros(1, 2)})
    with pytest.raises(ModelError, match="'more'"):
        other.load_weights({**weights, "more": torch.zeros(1)})


def test_operations_of_stem_blocks_and_head_are_counted():
    view = BlockView(create("vit_cifar"))
    modes = [module.training for module in view.modules()]
    # Block of width 192 on 16 tokens: qkv and proj 4 D^2, MLP of ratio two 4 D^2, attention 2 N D, two operations each.
    block = 2 * 16 * (8 * 192**2 + 2 * 16 * 192)
    convolutions = ((3, 64, 16), (64, 128, 8), (128, 128, 8), (128, 192, 4))
    stem = sum(2 * 9 * before * after * side**2 for before, after, side in convolutions) + 2 * 16 * 192**2
    assert view.count_flops() == (stem + 8 * block + 2 * 192 * 10, block)
    assert [module.training for module in view.modules()] == modes
