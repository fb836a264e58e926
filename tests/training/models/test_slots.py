"""Norms and gates of the slots: no initial effect, trained, cheap, in every family."""

import copy

import pytest
import torch
from timm.models.vision_transformer import ResPostBlock

from ls_edge.core.errors import ModelError, UsageError
from ls_edge.training.config import OptimConfig
from ls_edge.training.methods.registry import make_method
from ls_edge.training.models.slots import SlotNorms
from ls_edge.training.models.small_models import create
from ls_edge.training.models.view import BlockView
from ls_edge.training.optim import make_optimizer, make_schedule
from tests.training.trainings import criterion, set_tables, viewed

torch.set_num_threads(1)
NARROW = {"img_size": 32, "depth": 3, "embed_dim": 48, "num_heads": 3}
FAMILIES = [
    ("vit_tiny_patch16_224", NARROW),
    ("deit3_small_patch16_224", NARROW),
    ("cait_xxs24_224", {**NARROW, "num_heads": 4}),
    ("mixer_s32_224", {"img_size": 64}),
    ("resmlp_12_224", {"img_size": 64}),
    ("gmlp_ti16_224", {"img_size": 64}),
    ("eva02_tiny_patch14_224", {**NARROW, "img_size": 28}),
    ("beit_base_patch16_224", NARROW),
]
ORDER = [2, 0, 3, 1]
IMAGES = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))
TARGETS = torch.arange(6)


def add_norms(view, rate=3.0):
    view.slots = SlotNorms(list(view.blocks), view.branches, view.token_spec.dim, rate).train(view.training)


def normed(rate=3.0):
    view = viewed().eval()
    add_norms(view, rate)
    return view


@pytest.mark.parametrize(("name", "args"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_a_family_starts_unchanged_and_then_follows_the_formula(name, args):
    torch.manual_seed(0)
    view = BlockView(create(name, num_classes=5, **args)).eval()
    with torch.no_grad():
        for parameter in view.parameters():
            parameter.normal_(std=0.1)
    images = torch.randn(2, 3, *view.image_size)
    with torch.no_grad():
        before = view(images, [1, 2, 0])
        add_norms(view)
        assert torch.equal(view(images, [1, 2, 0]), before)
        branches = len(view.branches)
        assert [table.shape for table in view.slots.tables] == [
            (view.num_blocks, branches, 3, view.token_spec.dim)
        ] * view.num_blocks
        # Zero scale and shift and a gate of -1 leave nothing of a branch.
        tokens = view.stem(images)
        for branch in range(branches):
            view.slots.tables[1][2, branch, 2] = -1
        assert torch.equal(view.block(1, tokens, 2), tokens)
        assert not torch.equal(view.block(1, tokens, 0), tokens)
        # A scale by channel is that norm with other weights.
        view.slots.tables[1].zero_()
        scale = torch.randn(view.token_spec.dim)
        view.slots.tables[1][0, 0, 0] = scale
        found = view.block(1, tokens, 0)
        norm = view.blocks[1].get_submodule(view.branches[0].norm)
        weight, bias = (norm.weight, norm.bias) if hasattr(norm, "weight") else (norm.alpha, norm.beta)
        weight.copy_(weight * (1 + scale))
        bias.copy_(bias * (1 + scale))
        torch.testing.assert_close(found, view.block(1, tokens, 1), rtol=1e-4, atol=1e-5)


def test_a_batch_may_have_several_slots_and_gradients_reach_each():
    view = normed()
    set_tables(view)
    tokens = view.stem(IMAGES)
    mixed = view.block(2, tokens, torch.tensor([0, 3, 3, 1, 0, 2]))
    for row, slot in enumerate([0, 3, 3, 1, 0, 2]):
        torch.testing.assert_close(mixed[row], view.block(2, tokens, slot)[row])
    assert not torch.equal(view.block(2, tokens, 0), view.block(2, tokens, 3))
    criterion(view(IMAGES, ORDER), TARGETS).backward()
    for block, table in enumerate(view.slots.tables):
        slot = ORDER.index(block)
        assert table.grad[slot].abs().amin(dim=-1).gt(0).all()
        assert not table.grad[[other for other in range(4) if other != slot]].any()


def test_blocks_without_a_norm_before_each_branch_are_refused_in_one_line():
    view = BlockView(create("vit_tiny_patch16_224", num_classes=5, **NARROW, block_fn=ResPostBlock))
    with pytest.raises(
        ModelError, match="method shared: a ResPostBlock of VisionTransformer does not have a norm before each"
    ) as e:
        add_norms(view)
    assert "\n" not in str(e.value)
    assert view.slots is None
    with pytest.raises(UsageError, match=r"conditioning_lr is 0\.0; it has to be a number above 0"):
        make_method("shared", {"conditioning_lr": 0.0})


def test_norms_have_their_own_rate_and_no_decay():
    view = normed(5.0)
    optimizer = make_optimizer(view, OptimConfig(lr=1e-3, weight_decay=0.1, warmup=0.1))
    tables = {id(table) for table in view.slots.tables}
    [own] = [group for group in optimizer.param_groups if {id(p) for p in group["params"]} & tables]
    assert {id(p) for p in own["params"]} == tables
    assert own["weight_decay"] == 0
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(view.parameters()))
    schedule = make_schedule(optimizer, OptimConfig(lr=1e-3, warmup=0.1), 100)
    for step in (0, 5, 50, 99):
        schedule.step_update(step)
        rates = {group["lr"] for group in optimizer.param_groups if group is not own}
        assert len(rates) == 1
        assert own["lr"] == pytest.approx(5 * rates.pop())


def test_a_copy_has_its_own_norms():
    view = normed()
    set_tables(view)
    wanted = view(IMAGES, ORDER)
    twin = copy.deepcopy(view).eval()
    assert torch.equal(twin(IMAGES, ORDER), wanted)
    set_tables(view, seed=1)
    assert not torch.equal(view(IMAGES, ORDER), wanted)
    assert torch.equal(twin(IMAGES, ORDER), wanted)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_blocks_compute_the_same_with_one_graph():
    view = normed().train()
    set_tables(view)
    orders = [ORDER, [0, 1, 2, 3], [3, 2, 1, 0]]
    wanted = [view(IMAGES, order) for order in orders]
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    view.compile_blocks(backend)
    for order, expected in zip(orders, wanted, strict=True):
        torch.testing.assert_close(view(IMAGES, order), expected)
    assert len(graphs) == 1
    torch._dynamo.reset()


TRANSFORMERS = [(name, args) for name, args in FAMILIES if "depth" in args]


@pytest.mark.parametrize(("name", "args"), TRANSFORMERS, ids=[name for name, _ in TRANSFORMERS])
def test_adapters_of_full_rank_imitate_every_linear_layer_of_a_family(name, args):
    torch.manual_seed(0)
    view, teacher = (BlockView(create(name, num_classes=5, **args)).eval() for _ in range(2))
    with torch.no_grad():
        for module in teacher.blocks.modules():
            for key, value in module.named_parameters(recurse=False):
                if isinstance(module, torch.nn.Linear) or key in ("q_bias", "v_bias"):
                    value.normal_(std=0.1)
    view.keep_blocks([0, 0, 0])
    view.slots = SlotNorms(list(view.blocks), view.branches, view.token_spec.dim, rank=48)
    images = torch.randn(6, 3, *view.image_size)
    view.slots.imitate(0, dict(enumerate(teacher.blocks)), lambda: teacher(images))
    with torch.no_grad():
        tokens = teacher.stem(images)
        for slot in range(3):
            wanted = teacher.block(slot, tokens)
            allowed = {"rtol": 0, "atol": 1e-3 * wanted.abs().max()}
            torch.testing.assert_close(view.block(0, tokens, slot), wanted, **allowed)
            torch.testing.assert_close(view.block(0, tokens, torch.full((6,), slot)), wanted, **allowed)
            tokens = wanted
