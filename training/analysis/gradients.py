"""Saliency, images that excite a block, and images made again from the tokens after a block.

Excitation and inversion start from noise and follow the gradient with Adam, in trained order. Between two steps of
excitation a 3x3 Gaussian blur smooths the image, its sigma falling from 2.4 to 0, and from the middle on each step sees
the image shifted by a few pixels; both keep an image from becoming noise that happens to excite the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms

from ls_edge.data.pictures import picture
from ls_edge.evaluation.analysis.inside import Excitation, Inversion, Picture, Saliency
from ls_edge.training.analysis.inspected import (
    MOST_PICTURES,
    FirstImages,
    Inspected,
    color_picture,
    compared_pictures,
    correlation,
)

EXCITATION_STEPS = 200
INVERSION_STEPS = 300
RATE = 0.05
"""Learning rate of Adam on colors from 0 to 1."""
FIRST_SIGMA = 2.4
SHIFT = 1 / 20
"""Standard deviation of the noise that an inversion is compared with, and of the noise it starts from."""
INVERTED = 2
"""Images that are inverted."""


def run_blocks(inspected: Inspected, colors: Tensor, order: Iterable[int]) -> Tensor:
    """Return the tokens after the blocks of ``order``, with gradients for the colors."""
    view = inspected.model.view
    tokens: Tensor = view.stem(inspected.scale(colors))
    for slot, index in enumerate(order):
        tokens = view.block(index, tokens, slot)
    return tokens


class SaliencyMeasure(FirstImages):
    """Gradients of the answer's logit, in trained order and in a random order for each image."""

    most = 64

    def result(self) -> Saliency | None:
        """Return the statistics of the maps, and the first ones."""
        if not self._kept:
            return None
        images = self.images()
        colors = self.inspected.colors(images)
        trained, random = [], []
        for number in range(len(images)):
            one = colors[number : number + 1]
            answer, values = self._map(one, self.inspected.trained, None)
            trained.append(values)
            random.append(self._map(one, self.inspected.random_order(number), answer)[1])
            self.inspected.on_progress(number + 1, len(images), "saliency")
        tenth = max(1, trained[0].size // 10)
        shares = [np.sort(one, axis=None)[-tenth:].sum() / max(float(one.sum()), 1e-300) for one in trained]
        maps = {
            name: [[one] for one in each[:MOST_PICTURES]]
            for name, each in (("trained order", trained), ("random order", random))
        }
        return Saliency(
            top_share=float(np.mean(shares)),
            correlation=float(np.mean([correlation(*pair) for pair in zip(trained, random, strict=True)])),
            images=len(images),
            pictures=compared_pictures(colors[:MOST_PICTURES], maps),
        )

    def _map(self, colors: Tensor, order: Iterable[int], answer: int | None) -> tuple[int, np.ndarray]:
        """Return the class, by default that of the answer, and the map ``[H, W]`` of its logit."""
        colors = colors.detach().clone().requires_grad_()
        logits = self.model.view.head(run_blocks(self.inspected, colors, order))[0]
        chosen = int(logits.argmax()) if answer is None else answer
        (slope,) = torch.autograd.grad(logits[chosen], colors)
        return chosen, slope[0].abs().amax(dim=0).double().cpu().numpy()


class ExcitationMeasure(FirstImages):
    """For some blocks, an image that raises the channel that varies most over the data."""

    most = 64

    def result(self) -> Excitation | None:
        """Return the values that were reached, and the images."""
        if not self._kept:
            return None
        blocks = self.inspected.some_blocks
        added = self._added_to_images()
        channels = [int(added[index].std(dim=0).argmax()) for index in blocks]
        most = [float(added[index][:, channel].max()) for index, channel in zip(blocks, channels, strict=True)]
        noise, reached, shown = [], [], []
        for number, (index, channel) in enumerate(zip(blocks, channels, strict=True)):
            goal = self._goal(index, channel)
            colors = _noise(self.inspected, 1)
            noise.append(float(goal(colors).detach()))
            colors = _climb(colors, goal)
            reached.append(float(goal(colors).detach()))
            shown.append(Picture(f"block {index}, channel {channel}", picture(color_picture(colors[0].detach()))))
            self.inspected.on_progress(number + 1, len(blocks), "images that excite a block")
        count = len(added[0])
        return Excitation(list(blocks), channels, noise, most, reached, count, EXCITATION_STEPS, shown)

    @torch.no_grad()
    def _added_to_images(self) -> list[Tensor]:
        """Return the means over tokens that each block adds to the kept images, ``[B, D]``."""
        tokens = run_blocks(self.inspected, self.inspected.colors(self.images()), ())
        added = []
        for index in self.inspected.trained:
            after = self.model.view.block(index, tokens, index)
            added.append((after - tokens).mean(dim=1))
            tokens = after
        return added

    def _goal(self, index: int, channel: int) -> Callable[[Tensor], Tensor]:
        def value(colors: Tensor) -> Tensor:
            before = run_blocks(self.inspected, colors, range(index))
            after = self.model.view.block(index, before, index)
            found: Tensor = (after - before)[..., channel].mean()
            return found

        return value


def _climb(colors: Tensor, goal: Callable[[Tensor], Tensor]) -> Tensor:
    """Raise ``goal`` by gradient ascent, with blur and shifts."""
    colors = colors.clone().requires_grad_()
    optimizer = torch.optim.Adam([colors], lr=RATE)
    generator = torch.Generator().manual_seed(0)
    for step in range(EXCITATION_STEPS):
        seen = colors
        if step >= EXCITATION_STEPS // 2:
            most = max(1, colors.shape[-1] // 16)
            shift = torch.randint(-most, most + 1, (2,), generator=generator).tolist()
            seen = torch.roll(colors, shift, dims=(2, 3))
        (colors.grad,) = torch.autograd.grad(-goal(seen), colors)
        optimizer.step()
        sigma = FIRST_SIGMA * (1 - (step + 1) / EXCITATION_STEPS)
        with torch.no_grad():
            if sigma > 0.1:  # a smaller one changes no pixel
                colors.copy_(transforms.gaussian_blur(colors, [3, 3], [sigma, sigma]))
            colors.clamp_(0, 1)
    return colors


class InversionMeasure(FirstImages):
    """For some blocks, images whose tokens after the block are those of the first images."""

    most = INVERTED

    def result(self) -> Inversion | None:
        """Return the distances before and after, and the images."""
        if not self._kept:
            return None
        blocks, target = self.inspected.some_blocks, self.inspected.colors(self.images())
        generator = torch.Generator().manual_seed(self.inspected.seed)
        moved = target + SHIFT * torch.randn(target.shape, generator=generator).to(target.device)
        noise, reached, shifted = [], [], []
        shown = [Picture(f"image {number + 1}", picture(color_picture(one))) for number, one in enumerate(target)]
        for number, index in enumerate(blocks):
            goal = self._goal(index, target)
            colors = _noise(self.inspected, len(target))
            shifted.append(float(goal(moved).detach()))
            noise.append(float(goal(colors).detach()))
            colors = _descend(colors, goal)
            reached.append(float(goal(colors).detach()))
            shown += [Picture(f"from block {index}", picture(color_picture(one))) for one in colors.detach()]
            self.inspected.on_progress(number + 1, len(blocks), "inversion")
        return Inversion(list(blocks), noise, reached, shifted, len(target), INVERSION_STEPS, shown)

    def _goal(self, index: int, target: Tensor) -> Callable[[Tensor], Tensor]:
        with torch.no_grad():
            wanted = run_blocks(self.inspected, target, range(index + 1))
            size = wanted.square().sum(dim=(1, 2)).clamp_min(1e-12)

        def distance(colors: Tensor) -> Tensor:
            apart = run_blocks(self.inspected, colors, range(index + 1)) - wanted
            return (apart.square().sum(dim=(1, 2)) / size).mean()

        return distance


def _descend(colors: Tensor, goal: Callable[[Tensor], Tensor]) -> Tensor:
    """Lower ``goal`` by gradient descent with a falling rate."""
    colors = colors.clone().requires_grad_()
    optimizer = torch.optim.Adam([colors], lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, INVERSION_STEPS)
    for _ in range(INVERSION_STEPS):
        (colors.grad,) = torch.autograd.grad(goal(colors), colors)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            colors.clamp_(0, 1)
    return colors


def _noise(inspected: Inspected, count: int) -> Tensor:
    """Return gray images with seeded noise."""
    generator = torch.Generator().manual_seed(inspected.seed)
    noise = torch.randn((count, 3, *inspected.image.size), generator=generator)
    return (0.5 + SHIFT * noise).clamp(0, 1).to(inspected.model.view.device)
