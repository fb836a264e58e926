"""Modes of torch around a call change nothing in it, and are the caller's again after it."""

import contextlib
import functools

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import ls_edge

MODES = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": functools.partial(torch.autocast, "cpu", torch.bfloat16),
    "float64": None,
    "meta": functools.partial(torch.device, "meta"),
    "math": functools.partial(sdpa_kernel, SDPBackend.MATH),
    "products": None,
}


@contextlib.contextmanager
def mode(name):
    if name == "products":
        torch.set_float32_matmul_precision("medium")
        try:
            yield
            assert torch.get_float32_matmul_precision() == "medium"
        finally:
            torch.set_float32_matmul_precision("highest")
        return
    if name != "float64":
        with MODES[name]():
            yield
        return
    torch.set_default_dtype(torch.float64)
    try:
        yield
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def results(folder):
    """Train, evaluate, export, analyze, and publish; return what they found."""
    changes = ["model.args={depth: 2, embed_dim: 16, num_heads: 2}", "precision=fp32"]
    ls_edge.train("digits", folder / "run", epochs=1, batch_size=256, threads=1, changes=changes, on_warning=print)
    found = ls_edge.evaluate(folder / "run", "digits", orders=2, keep=(1,), limit=64, on_warning=print)
    bundle = ls_edge.export(folder / "run", folder / "bundle", on_warning=print)
    analysis = ls_edge.analyze(folder / "run", "digits", what=("agreement",), limit=16, orders=2, on_warning=print)
    assert ls_edge.publish(folder / "run", folder / "published").timm
    return (
        (folder / "run" / "model.safetensors").read_bytes(), found.sequential, found.arbitrary, found.kept,
        bundle.bundle.manifest.bundle_id, analysis.agreement,
    )  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return results(tmp_path_factory.mktemp("plain"))


@pytest.mark.leaks_ok(reason="torch's exporter starts a monitor thread of tqdm")
@pytest.mark.parametrize(
    "name", ["no_grad", *(pytest.param(name, marks=pytest.mark.release) for name in list(MODES)[1:])]
)
def test_functions_are_not_at_the_mercy_of_their_caller(plain, tmp_path, name):
    torch.manual_seed(3)
    np.random.seed(3)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    with mode(name):
        assert results(tmp_path) == plain
        assert torch.is_inference_mode_enabled() == (name == "inference")
        assert torch.is_autocast_enabled("cpu") == (name == "autocast")
        assert torch.is_grad_enabled() == (name not in ("no_grad", "inference"))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
