"""Gradients of outputs with respect to pixels, and images that are optimized with these gradients.

Excitation and inversion start from noise and follow the gradient with Adam, in trained order. For excitation, a 3x3
Gaussian blur with a sigma that falls from 2.4 to 0 smooths the image between steps, and in the second half, each step
sees the image shifted by a few pixels. Both prevent the image from becoming noise that happens to excite the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms

from ls_edge.training.inspection.inspected import Inspected

RATE = 0.05
"""Learning rate of Adam on colors from 0 to 1."""
FIRST_SIGMA = 2.4
NOISE = 1 / 20
"""Standard deviation of noise on colors from 0 to 1."""


def run_blocks(inspected: Inspected, colors: Tensor, order: Iterable[int]) -> Tensor:
    """Return the tokens after the blocks of ``order``, differentiable with respect to the colors."""
    view = inspected.model.view
    tokens: Tensor = view.stem(inspected.scale(colors))
    for slot, index in enumerate(order):
        tokens = view.block(index, tokens, slot)
    return tokens


def descend(colors: Tensor, loss: Callable[[Tensor], Tensor], steps: int, *, smooth: bool = False) -> Tensor:
    """Minimize ``loss`` by gradient descent, with a falling rate or, if ``smooth``, with blur and shifts."""
    colors = colors.clone().requires_grad_()
    optimizer = torch.optim.Adam([colors], lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=RATE if smooth else 0.0)
    generator = torch.Generator().manual_seed(0)
    most = max(1, colors.shape[-1] // 16)
    for step in range(steps):
        seen = colors
        if smooth and step >= steps // 2:
            shift = torch.randint(-most, most + 1, (2,), generator=generator).tolist()
            seen = torch.roll(colors, shift, dims=(2, 3))
        (colors.grad,) = torch.autograd.grad(loss(seen), colors)
        optimizer.step()
        schedule.step()
        sigma = FIRST_SIGMA * (1 - (step + 1) / steps)
        with torch.no_grad():
            if smooth and sigma > 0.1:  # a smaller sigma does not change any pixel
                colors.copy_(transforms.gaussian_blur(colors, [3, 3], [sigma, sigma]))
            colors.clamp_(0, 1)
    return colors.detach()


def gray_noise(inspected: Inspected, count: int) -> Tensor:
    """Return gray images with seeded noise."""
    generator = torch.Generator().manual_seed(inspected.seed)
    noise = torch.randn((count, 3, *inspected.image.size), generator=generator)
    return (0.5 + NOISE * noise).clamp(0, 1).to(inspected.model.view.device)
