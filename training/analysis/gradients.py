"""Saliency, images that excite a block, and images reconstructed from the tokens after a block.

Excitation and inversion start from noise and follow the gradient with Adam, in trained order. Between two steps of
excitation a 3x3 Gaussian blur smooths the image, its sigma falling from 2.4 to 0, and from the halfway point each step
sees the image shifted by a few pixels. Both keep the image from becoming noise that happens to excite the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms

from ls_edge.data.pictures import picture
from ls_edge.evaluation.analysis.inside import Excitation, Inversion, Picture, Saliency
from ls_edge.evaluation.measure import Order
from ls_edge.training.analysis.inspected import Inspected, LabeledImages, color_picture, compare, images_of

EXCITATION_STEPS = 200
INVERSION_STEPS = 300
RATE = 0.05
"""Learning rate of Adam on colors from 0 to 1."""
FIRST_SIGMA = 2.4
SHIFT = 1 / 20
"""Standard deviation of the noise that an inversion is compared with, and of the noise it starts from."""
MOST_IMAGES = 64
"""Images with a saliency map, and images whose largest value an excitation is compared with."""
INVERTED = 2
"""Images that are inverted."""


def run_blocks(inspected: Inspected, colors: Tensor, order: Iterable[int]) -> Tensor:
    """Return the tokens after the blocks of ``order``, with gradients for the colors."""
    view = inspected.model.view
    tokens: Tensor = view.stem(inspected.scale(colors))
    for slot, index in enumerate(order):
        tokens = view.block(index, tokens, slot)
    return tokens


def saliency(inspected: Inspected, batches: Sequence[LabeledImages]) -> Saliency:
    """Return the gradients of the answer's logit, in trained order and in a random order for each image."""
    images = images_of(batches, MOST_IMAGES)
    answers = inspected.model.head(inspected.run(inspected.model.stem(images), inspected.trained)).argmax(axis=1)

    def maps_of(number: int, order: Order) -> np.ndarray:
        colors = inspected.colors(images[number : number + 1])
        return saliency_map(inspected, colors, order, int(answers[number]))[None]

    found = compare(inspected, images, maps_of, "saliency")
    ranked = np.sort(found.trained.reshape(len(images), -1), axis=1)
    tenth = max(1, ranked.shape[1] // 10)
    shares = ranked[:, -tenth:].sum(axis=1) / np.maximum(ranked.sum(axis=1), 1e-300)
    return Saliency(float(np.mean(shares)), found.correlation, len(images), found.pictures)


def saliency_map(inspected: Inspected, colors: Tensor, order: Order, answer: int) -> np.ndarray:
    """Return the magnitude of the gradient of a class's logit by pixel, the maximum over the colors, ``[H, W]``."""
    colors = colors.detach().requires_grad_()
    logits = inspected.model.view.head(run_blocks(inspected, colors, order))[0]
    (slope,) = torch.autograd.grad(logits[answer], colors)
    found: np.ndarray = slope[0].abs().amax(dim=0).double().cpu().numpy()
    return found


def excite(inspected: Inspected, batches: Sequence[LabeledImages]) -> Excitation:
    """Return an image for each of some blocks that excites the channel that varies most over the data."""
    blocks, colors = inspected.some_blocks, inspected.colors(images_of(batches, MOST_IMAGES))
    channels, noise, most, reached, shown = [], [], [], [], []
    for number, index in enumerate(blocks):
        with torch.no_grad():
            added = _added(inspected, index, colors).mean(dim=1)
        channel = int(added.std(dim=0).argmax())

        def loss(some: Tensor, index: int = index, channel: int = channel) -> Tensor:
            return -_added(inspected, index, some)[..., channel].mean()

        start = _noise(inspected, 1)
        raised = _descend(start, loss, EXCITATION_STEPS, smooth=True)
        channels.append(channel)
        most.append(float(added[:, channel].max()))
        noise.append(-float(loss(start).detach()))
        reached.append(-float(loss(raised).detach()))
        shown.append(Picture(f"block {index}, channel {channel}", picture(color_picture(raised[0]))))
        inspected.on_progress(number + 1, len(blocks), "images that excite a block")
    return Excitation(list(blocks), channels, noise, most, reached, len(colors), EXCITATION_STEPS, shown)


def _added(inspected: Inspected, index: int, colors: Tensor) -> Tensor:
    """Return the change that a block makes to the tokens in trained order, ``[B, N, D]``."""
    before = run_blocks(inspected, colors, range(index))
    after: Tensor = inspected.model.view.block(index, before, index)
    return after - before


def inversion(inspected: Inspected, batches: Sequence[LabeledImages]) -> Inversion:
    """Reconstruct the first images from their tokens after some blocks."""
    blocks, target = inspected.some_blocks, inspected.colors(images_of(batches, INVERTED))
    generator = torch.Generator().manual_seed(inspected.seed)
    moved = target + SHIFT * torch.randn(target.shape, generator=generator).to(target.device)
    noise, reached, shifted = [], [], []
    shown = [Picture(f"image {number + 1}", picture(color_picture(one))) for number, one in enumerate(target)]
    for number, index in enumerate(blocks):
        with torch.no_grad():
            wanted = run_blocks(inspected, target, range(index + 1))

        def distance(colors: Tensor, index: int = index, wanted: Tensor = wanted) -> Tensor:
            apart = run_blocks(inspected, colors, range(index + 1)) - wanted
            return (apart.square().sum(dim=(1, 2)) / wanted.square().sum(dim=(1, 2)).clamp_min(1e-12)).mean()

        start = _noise(inspected, len(target))
        made = _descend(start, distance, INVERSION_STEPS)
        noise.append(float(distance(start).detach()))
        shifted.append(float(distance(moved).detach()))
        reached.append(float(distance(made).detach()))
        shown += [Picture(f"from block {index}", picture(color_picture(one))) for one in made]
        inspected.on_progress(number + 1, len(blocks), "inversion")
    return Inversion(list(blocks), noise, reached, shifted, len(target), INVERSION_STEPS, shown)


def _descend(colors: Tensor, loss: Callable[[Tensor], Tensor], steps: int, *, smooth: bool = False) -> Tensor:
    """Lower ``loss`` by gradient descent: with a falling rate, or ``smooth``, with blur and shifts."""
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
            if smooth and sigma > 0.1:  # a smaller one changes no pixel
                colors.copy_(transforms.gaussian_blur(colors, [3, 3], [sigma, sigma]))
            colors.clamp_(0, 1)
    return colors.detach()


def _noise(inspected: Inspected, count: int) -> Tensor:
    """Return gray images with seeded noise."""
    generator = torch.Generator().manual_seed(inspected.seed)
    noise = torch.randn((count, 3, *inspected.image.size), generator=generator)
    return (0.5 + SHIFT * noise).clamp(0, 1).to(inspected.model.view.device)
