"""Devices, precisions, and attention on the CPU."""

import pytest
import torch

from ls_edge.core.errors import UsageError
from ls_edge.training.loop import train
from ls_edge.training.models.small_models import create
from ls_edge.training.models.view import BlockView
from ls_edge.training.precision import autocast, choose_device, choose_precision, own_torch_state, plain_attention
from ls_edge.training.runs.checkpoint import load_run
from tests.training.trainings import SMALL, Silent, settings


def test_devices_and_precisions_that_are_missing_are_refused():
    cpu = torch.device("cpu")
    if not torch.cuda.is_available():
        assert choose_device("auto") == cpu
        with pytest.raises(UsageError, match="torch sees no CUDA device"):
            choose_device("cuda")
    with pytest.raises(UsageError, match="fp16 needs CUDA"):
        choose_precision("fp16", cpu)


def test_bfloat16_trains_with_float32_weights(tmp_path):
    summary = train(settings(epochs=1, precision="bf16"), tmp_path / "run", reporter=Silent())
    assert summary.precision == "bfloat16"
    assert {value.dtype for value in load_run(tmp_path / "run").view.weights().values()} == {torch.float32}


def test_half_precision_uses_the_current_weights():
    """Training calls this inside of a context that turns the caller's autocast off."""
    layer, images = torch.nn.Linear(8, 8), torch.ones(1, 8)
    with own_torch_state():
        for _ in range(2):
            with autocast(torch.device("cpu"), torch.bfloat16):
                half = layer(images)
            assert torch.allclose(half.float(), layer(images), atol=0.05)
            with torch.no_grad():
                layer.weight.mul_(-4)


def test_plain_attention_is_switched_back():
    view = BlockView(create("vit_digits", **{**SMALL, "depth": 2}))
    before = [block.attn.fused_attn for block in view.blocks]
    with plain_attention(view, torch.device("cpu")):
        assert not any(block.attn.fused_attn for block in view.blocks)
    assert [block.attn.fused_attn for block in view.blocks] == before
