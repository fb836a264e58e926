"""Images that a tiny model learns in an epoch or two: noise around a color for each class."""

import numpy as np
from PIL import Image

COLORS = {"blue": (40, 60, 200), "green": (60, 200, 40), "red": (200, 40, 60)}


def write_colors(top, count=40, names=tuple(COLORS), seed=0, noise=40):
    """Write ``count`` images of each color to a folder of that name, or of another in ``names``."""
    rng = np.random.default_rng(seed)
    counts = count if isinstance(count, tuple) else (count,) * len(names)
    for name, color, images in zip(names, COLORS.values(), counts, strict=False):
        (top / name).mkdir(parents=True)
        for index in range(images):
            pixels = np.clip(np.array(color) + rng.normal(0, noise, (16, 16, 3)), 0, 255)
            Image.fromarray(pixels.astype(np.uint8)).save(top / name / f"{index:03}.png")
    return top
