"""Suggestion of a model for data without a default model, with the time of an epoch on this machine."""

from __future__ import annotations

import time

import torch

from ls_edge.data.datasets import ImageSet
from ls_edge.training.models.small_models import create
from ls_edge.training.precision import choose_device

SUGGESTED = "vit_tiny_patch16_224"
_BATCH, _STEPS = 8, 2


def model_advice(images: ImageSet) -> str:
    """Suggest a model for these images; estimate the time of an epoch from two training steps."""
    device = choose_device("auto")
    model = create(SUGGESTED, num_classes=len(images.classes)).train().to(device)
    batch = torch.zeros(_BATCH, 3, 224, 224, device=device)
    took = 0.0
    for _ in range(_STEPS):  # the first one also allocates
        started = time.perf_counter()
        loss = model(batch).sum()
        loss.backward()
        loss.item()  # waits for a GPU
        took = time.perf_counter() - started
    minutes = took / _BATCH * len(images) / 60
    shown = "less than a minute" if minutes < 1 else f"about {minutes:,.0f} minutes"
    return (
        f"give --model {SUGGESTED} --pretrained; without counting the decoding of images, an epoch of these "
        f"{len(images):,} images takes {shown} on this machine ({device.type})"
    )
