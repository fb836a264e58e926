"""Every model family: trained order equals timm's forward, other arrangements run, the parts export."""

import re
from pathlib import Path

import msgspec
import pytest
import timm
import torch

from ls_edge.core.errors import ModelError
from ls_edge.export.writer import export_run
from ls_edge.training.config import RunRecord, TrainConfig
from ls_edge.training.models.adapters import eva as eva_adapter
from ls_edge.training.models.families import FAMILIES, family_of
from ls_edge.training.models.small_models import create, image_spec_of
from ls_edge.training.models.view import BlockView
from ls_edge.training.runs.checkpoint import load_run, save_run
from tests.arrangements import arrangement_of

torch.set_num_threads(1)
NARROW = {"img_size": 32, "patch_size": 8, "depth": 3, "embed_dim": 48, "num_heads": 3}
SMALL = {"img_size": 64}
MODELS = [
    ("deit_tiny_distilled_patch16_224", NARROW),
    ("deit3_small_patch16_224", NARROW),
    ("vit_small_patch14_reg4_dinov2", NARROW),
    ("vit_base_patch16_siglip_224", NARROW),
    ("cait_xxs24_224", {**NARROW, "num_heads": 4}),
    ("mixer_s32_224", SMALL),
    ("resmlp_12_224", SMALL),
    ("gmlp_ti16_224", SMALL),
    ("eva02_tiny_patch14_224", NARROW),
    ("vit_small_patch16_dinov3", NARROW),
    ("vit_small_patch16_rope_mixed_224", NARROW),
    ("vit_base_patch16_sapiens2", {**NARROW, "num_heads": 4, "num_kv_heads": 2}),
    ("beit_base_patch16_224", NARROW),
    ("beit_base_patch16_224", {**NARROW, "use_rel_pos_bias": False, "use_shared_rel_pos_bias": True}),
]
IDS = [f"{name}-shared" if "use_shared_rel_pos_bias" in args else name for name, args in MODELS]


def without_patch(name, args):
    """Return an image size that every patch size divides; some of timm's builders fix it."""
    kept = {key: value for key, value in args.items() if key != "patch_size"}
    return {**kept, "img_size": 28 if "patch14" in name else 32} if "patch_size" in args else kept


def made(name, args):
    if not timm.is_model(name):
        pytest.skip(f"timm {timm.__version__} has no {name}")
    torch.manual_seed(0)
    view = BlockView(create(name, num_classes=5, **without_patch(name, args)))
    with torch.no_grad():
        for parameter in view.parameters():
            parameter.normal_(std=0.1)
    return view.eval()


@pytest.mark.parametrize(("name", "args"), MODELS, ids=IDS)
def test_a_family_runs_in_any_arrangement_and_with_fewer_blocks(name, args):
    view = made(name, args)
    images = torch.randn(2, 3, *view.image_size)
    blocks = view.num_blocks
    with torch.no_grad():
        trained = view.model(images)
        assert trained.std() > 0
        assert torch.equal(view(images), trained)
        assert not torch.equal(view(images, list(reversed(range(blocks)))), trained)
        tracks = arrangement_of([[[2], [0, 1]]])
        start = view.stem(images)
        one = view.block(2, start)
        other = view.block(1, view.block(0, start))
        torch.testing.assert_close(view(images, tracks), view.head(start + (one - start) + (other - start)))
        assert start.shape == (2, view.token_spec.count, view.token_spec.dim)
        assert view.weights().keys() == view.model.state_dict().keys()
        last = blocks - 1
        wanted = view(images, [last, 0])
        view.keep_blocks([0, last])
        assert view.num_blocks == 2
        assert torch.equal(view(images, [1, 0]), wanted)
        assert torch.equal(view(images), view.model(images))


def test_a_table_that_is_not_learned_is_not_part_of_a_checkpoint():
    view = made("vit_small_patch16_dinov3", NARROW)
    assert "rope_table" in dict(view.model.named_buffers())
    assert "rope_table" not in view.weights()


def test_a_models_own_augmentation_of_coordinates_is_left_out():
    view = made("vit_base_patch16_sapiens2", {**NARROW, "num_heads": 4, "num_kv_heads": 2})
    image = torch.randn(1, 3, *view.image_size)
    with torch.no_grad():
        assert torch.equal(view.train()(image), view.model(image))
        assert torch.equal(view(image), view(image))


@pytest.mark.parametrize(("args", "words"), [({"patch_drop_rate": 0.5}, "patch_drop_rate"),
                                            ({"rope_jitter_coords": 2.0}, "rotary coordinates")])  # fmt: skip
def test_augmentation_across_blocks_is_refused(args, words):
    with pytest.raises(ModelError, match=words):
        made("vit_small_patch16_dinov3", {**NARROW, **args})


@pytest.mark.parametrize(
    "name", ["convit_tiny", "hiera_tiny_224", "twins_svt_small", "swin_tiny_patch4_window7_224", "resnet18"]
)
def test_other_models_are_refused_with_the_supported_ones(name):
    try:
        with torch.device("meta"):
            model = timm.create_model(name)
    except (RuntimeError, NotImplementedError):  # older versions look at numbers while they build
        model = timm.create_model(name)
    with pytest.raises(ModelError, match=r"supported: ViT, .* CaiT; MLP-Mixer, .* EVA, .* BEiT"):
        family_of(model)


SLOW = pytest.mark.release
ONE_OF_EACH = (
    pytest.param("deit_tiny_distilled_patch16_224", marks=SLOW),
    pytest.param("cait_xxs24_224", marks=SLOW),
    pytest.param("mixer_s32_224", marks=SLOW),
    "vit_small_patch16_dinov3",
    pytest.param("beit_base_patch16_224-shared", marks=SLOW),
)


@pytest.mark.leaks_ok(reason="torch's exporter starts a monitor thread of tqdm")
@pytest.mark.parametrize("which", ONE_OF_EACH)
def test_a_family_exports(tmp_path, which):
    name, args = MODELS[IDS.index(which)]
    view = made(name, args)
    built = {**without_patch(name, args), "num_classes": 5}
    kept = (0, view.num_blocks - 1)
    view.keep_blocks(kept)
    record = RunRecord(
        version="0", model=name, model_args=built, kept=kept, classes=tuple("abcde"), image=image_spec_of(view),
        trained_on="", method="shuffle",
    )  # fmt: skip
    save_run(tmp_path / "run", view, TrainConfig(), record)
    exported = export_run(load_run(tmp_path / "run"), tmp_path / "bundle")
    assert exported.bundle.num_blocks == 2


def test_the_document_names_every_family():
    text = (Path(__file__).parents[3] / "docs" / "train.md").read_text(encoding="utf-8")
    assert {f"`{family.timm_class.__name__}`" for family in FAMILIES} <= set(re.findall(r"`\w+`", text))


def test_a_learned_rotary_table_is_computed_for_its_block_alone(monkeypatch):
    view = made("vit_small_patch16_rope_mixed_224", NARROW)
    rope = view.model.rope
    tables = rope.get_embed()
    sizes = []
    compute = eva_adapter.get_mixed_freqs
    monkeypatch.setattr(eva_adapter, "get_mixed_freqs", lambda f, *rest: sizes.append(f.shape) or compute(f, *rest))
    monkeypatch.setattr(type(rope), "get_embed", lambda *_, **__: pytest.fail("made for all blocks"))
    family = family_of(view.model)
    for index in range(view.num_blocks):
        torch.testing.assert_close(family.block_inputs(view.model, index)["rope"], tables[index], rtol=0, atol=0)
    assert sizes == [rope.freqs[:, 0].shape] * view.num_blocks


def test_the_crop_mode_of_a_model_is_part_of_its_preprocessing():
    view = BlockView(create("eva02_base_patch14_448.mim_in22k_ft_in22k_in1k", num_classes=3, **NARROW))
    assert image_spec_of(view).crop_mode == "squash"
    for mode, found in (("border", "border"), ("center", msgspec.UNSET)):
        view.model.pretrained_cfg = {**view.model.pretrained_cfg, "crop_mode": mode}
        assert image_spec_of(view).crop_mode == found
