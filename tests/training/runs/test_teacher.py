"""Distillation from a trained teacher: preprocessing, classes, hard and soft losses, whole trainings."""

import msgspec
import pytest
import safetensors.torch
import timm
import torch
from torch.nn import functional

from ls_edge.core.errors import ModelError, RunError, UsageError
from ls_edge.training.config import TeacherConfig
from ls_edge.training.data import normalizer
from ls_edge.training.runs.checkpoint import CONFIG, load_run
from ls_edge.training.runs.teacher import Teacher, TeacherCriterion, open_teacher
from tests.training.commands import call

CLASSES = tuple("0123456789")
TINY = "model: {args: {embed_dim: 16, depth: 4, num_heads: 2, mlp_ratio: 2.0}}\nbatch_size: 128\nprecision: fp32\n"
CPU = torch.device("cpu")
PIXELS = torch.randint(0, 256, (6, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([3, 1, 4, 1, 5, 9])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run, and a convolutional model with weights in a file."""
    folder = tmp_path_factory.mktemp("teachers")
    (folder / "tiny.yaml").write_text(TINY)
    assert call("train", "--data", "digits", "--out", folder / "run", "--config", folder / "tiny.yaml",
                "--method", "sequential", "--epochs", 3) == 0  # fmt: skip
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=10)
    safetensors.torch.save_file(model.state_dict(), str(folder / "resnet.safetensors"))
    return folder


def opened(**settings):
    return open_teacher(TeacherConfig(**settings), CLASSES, CPU, torch.float32)


def test_a_run_as_a_teacher_gives_its_own_logits(folder):
    run = load_run(folder / "run")
    with torch.no_grad():
        expected = run.view(normalizer(run.record.image, CPU)(PIXELS))
    torch.testing.assert_close(opened(model=str(folder / "run")).logits(PIXELS), expected)


def test_a_convolutional_teacher_has_its_own_size_and_normalization(folder):
    teacher = opened(model="test_resnet", weights=str(folder / "resnet.safetensors"))
    assert teacher.size == (160, 160)
    seen = []
    teacher.model.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    logits = teacher.logits(PIXELS)
    scaled = functional.interpolate(PIXELS / 255, (160, 160), mode="bicubic", antialias=True).clamp(0, 1)
    torch.testing.assert_close(seen[0], (scaled - 0.5) / 0.5)
    assert logits.shape == (6, 10)
    assert not logits.requires_grad
    assert not teacher.model.training
    stated = {"state_dict": safetensors.torch.load_file(folder / "resnet.safetensors"), "args": {"mean": [0.2]}}
    torch.save(stated, folder / "resnet.pth")
    taught = opened(model="test_resnet", weights=str(folder / "resnet.pth"))
    torch.testing.assert_close(taught.images(PIXELS), (scaled - 0.2) / 0.5)
    norm = Teacher(torch.nn.Identity(), size=(16, 16), mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 4.0), columns=[0],
                   device=CPU, dtype=torch.float32)  # fmt: skip
    expected = (PIXELS / 255 - torch.tensor([0.1, 0.2, 0.3])[:, None, None]) / torch.tensor([1.0, 2, 4])[:, None, None]
    torch.testing.assert_close(norm.images(PIXELS), expected)


def test_classes_are_matched_by_name(folder):
    run = str(folder / "run")
    turned = open_teacher(TeacherConfig(model=run), CLASSES[::-1], CPU, torch.float32)
    torch.testing.assert_close(turned.logits(PIXELS), opened(model=run).logits(PIXELS).flip(1))
    few = open_teacher(TeacherConfig(model=run), ("7", "2"), CPU, torch.float32)
    torch.testing.assert_close(few.logits(PIXELS), opened(model=run).logits(PIXELS)[:, [7, 2]])


def test_losses_weigh_labels_and_teacher(folder):
    teacher = opened(model=str(folder / "run"))
    targets = teacher.targets(PIXELS, LABELS)
    answers = teacher.logits(PIXELS)
    assert targets.shape == (6, 11)
    logits = torch.randn(6, 10, generator=torch.Generator().manual_seed(1))
    own = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    hard = TeacherCriterion(own, TeacherConfig(weight=0.25))(logits, targets)
    named = functional.cross_entropy(logits, answers.argmax(1))
    torch.testing.assert_close(hard, 0.75 * own(logits, LABELS) + 0.25 * named)
    soft = TeacherCriterion(own, TeacherConfig(kind="soft", weight=1.0, temperature=3.0))(logits, targets)
    p = functional.softmax(answers / 3, 1)
    divergence = (p * (p.log() - functional.log_softmax(logits / 3, 1))).sum(1).mean() * 9
    torch.testing.assert_close(soft, divergence)
    assert TeacherCriterion(own, TeacherConfig(weight=0.0))(logits, targets) == own(logits, LABELS)


def test_teachers_that_do_not_load_are_refused_in_one_line(folder, tmp_path, capsys):
    weights = safetensors.torch.load_file(folder / "resnet.safetensors")
    weights["fc.weight"][0] = torch.nan
    safetensors.torch.save_file(weights, tmp_path / "nan.safetensors")
    for settings, kind, text in (
        (
            {"model": "test_resnet", "weights": str(tmp_path / "nan.safetensors")},
            ModelError,
            "--teacher: 'fc.weight' has NaN",
        ),
        ({"model": str(tmp_path)}, RunError, f"is not a run: it has no {CONFIG}"),
        ({"model": "resnet_x"}, ModelError, "--teacher: unknown model 'resnet_x'"),
        ({"model": "test_resnet", "weights": "no.pth"}, RunError, "no.pth: there is no such file"),
        (
            {"model": "test_vit", "weights": str(folder / "resnet.safetensors")},
            ModelError,
            "does not fit test_vit with 10",
        ),
        ({"model": str(folder / "run"), "weights": "x.pth"}, UsageError, "leave teacher.weights out"),
    ):
        with pytest.raises(kind, match=text.replace("(", r"\(")) as caught:
            opened(**settings)
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="does not know the class 'cat' of the data and 1 more"):
        open_teacher(TeacherConfig(model=str(folder / "run")), ("1", "cat", "dog"), CPU, torch.float32)
    weights = str(folder / "resnet.safetensors")
    with pytest.raises(ModelError, match="with 3 classes"):
        open_teacher(TeacherConfig(model="test_resnet", weights=weights), ("a", "b", "c"), CPU, torch.float32)
    train = ["train", "--data", "digits", "--out", tmp_path / "out"]
    assert call(*train, "--set", "teacher.weights=x.pth") == 2
    assert "weights is 'x.pth' without a teacher" in capsys.readouterr().err
    config = tmp_path / "bad.yaml"
    config.write_text("teacher: {model: a, weight: 2}\n")
    assert call(*train, "--config", config) == 2
    assert "weight is 2; it has to be a number from 0 to 1" in capsys.readouterr().err
    assert msgspec.structs.asdict(TeacherConfig())["kind"] == "hard"
