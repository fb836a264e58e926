"""Steps in several parts and with recomputed blocks train the same."""

import functools

import msgspec
import pytest
import torch

from ls_edge.training.methods.registry import make_method
from ls_edge.training.models.small_models import build
from ls_edge.training.setup import with_compiler
from ls_edge.training.task import whole_batch_only
from tests.training import trainings
from tests.training.trainings import SMALL

settings = functools.partial(trainings.settings, epochs=1, lr=1e-3)


def test_checkpointing_gives_the_same_gradients_and_runs_blocks_twice():
    torch.manual_seed(0)
    view = build("vit_digits", {**SMALL, "drop_rate": 0.1, "proj_drop_rate": 0.1}).train()
    make_method("position", {}).attach(view)
    images, runs = torch.randn(2, 3, 16, 16), []
    view.blocks[1].register_forward_pre_hook(lambda *_: runs.append(1))
    found = []
    for view.checkpointing in (False, True):
        view.zero_grad()
        torch.manual_seed(1)
        view(images, [1, 0, 2]).square().sum().backward()
        found.append([parameter.grad.clone() for parameter in view.parameters()])
    assert len(runs) == 3
    for plain, again in zip(*found, strict=True):
        torch.testing.assert_close(plain, again)


@pytest.mark.parametrize("rate", ["drop", "attn_drop", "proj_drop", "pos_drop", "drop_path", "patch_drop"])
def test_models_that_draw_for_a_batch_need_all_of_it(rate):
    view = build("vit_digits", {**SMALL, f"{rate}_rate": 0.2}).train()
    before = torch.get_rng_state()
    view(torch.zeros(2, 3, 16, 16))
    assert not torch.equal(torch.get_rng_state(), before)
    assert "draws random numbers for a batch" in whole_batch_only(view)
    assert whole_batch_only(build("vit_digits", {**SMALL, f"{rate}_rate": 0.0})) == ""
    assert whole_batch_only(torch.nn.TransformerEncoderLayer(8, 2, dropout=0.1).self_attn)


@pytest.mark.parametrize(
    ("asked", "device", "problem", "compiles"),
    [
        ("auto", "cuda", "", True),
        ("auto", "cuda", "there is no C compiler", False),
        ("auto", "cpu", "there is no C compiler", False),
        (True, "cuda", "there is no C compiler", True),
        (False, "cuda", "", False),
    ],
)
def test_blocks_are_compiled_on_cuda_with_a_compiler(monkeypatch, asked, device, problem, compiles):
    monkeypatch.setattr("ls_edge.training.setup.compiler_problem", lambda: problem)
    warnings = []
    config = msgspec.structs.replace(settings(), compile=asked)
    assert with_compiler(config, torch.device(device), warnings.append).compile == compiles
    wanted = [f"trains without compiled blocks, which is slower: {problem}; install it, or set compile: off"]
    assert warnings == (wanted if problem and (asked, device) == ("auto", "cuda") else [])
