"""Documents of the kinds of analysis that read the weights, the attention or the gradients of a run.

They are measured by ``ls_edge.training.analysis``: an engine of a bundle shows none of these. Pictures are PNG files as
data URIs, so a page can show them and JSON has them.
"""

from __future__ import annotations

import msgspec
import numpy as np

from ls_edge.evaluation.analysis.measures import Score


class Picture(msgspec.Struct, frozen=True):
    """A picture and the text below it."""

    text: str
    source: str
    """PNG file as a data URI."""


class AttentionStatistics(msgspec.Struct, frozen=True):
    """Attention in trained order by block and head; means over images and queries."""

    distance: list[list[float]]
    """Mean distance between patches that attend to each other, weighted by attention, in patches."""
    entropy: list[list[float]]
    """Entropy of the attention of a token over all tokens, in nats."""
    grid: tuple[int, int]
    prefix_tokens: int
    """Tokens before the patches, which distances leave out."""


class Rollout(msgspec.Struct, frozen=True):
    """Attention rollout over the patches, row by row, of the first images."""

    trained: list[list[float]]
    random: list[list[float]]
    """The same images, each in a random order of its own."""
    correlation: float
    """Mean of the correlation of both maps of an image."""
    peak: float
    """Mean of the largest value of a map in trained order over its mean: 1 for a map that is equal everywhere."""
    images: int
    grid: tuple[int, int]
    pictures: list[Picture]


class ClassAttention(msgspec.Struct, frozen=True):
    """Attention of the class token to the patches (CaiT, arXiv 2103.17239), by layer and head."""

    entropy: list[list[float]]
    """Entropy in trained order of the attention over class token and patches, in nats."""
    own: list[list[float]]
    """Attention of the class token to itself in trained order."""
    correlation: float
    """Mean of the correlation of a map with that of the same image in a random order of the patch blocks."""
    images: int
    grid: tuple[int, int]
    pictures: list[Picture]


class Saliency(msgspec.Struct, frozen=True):
    """Gradient of the logit of the answer with respect to the pixels; its largest absolute value over the colors."""

    top_share: float
    """Share of a map in the tenth of the pixels with the largest gradients: 0.1 for a map that is equal everywhere."""
    correlation: float
    """Mean of the correlation of the maps of an image in trained and in random order."""
    images: int
    pictures: list[Picture]


class PositionEmbeddings(msgspec.Struct, frozen=True):
    """Cosine similarity of the position embeddings of patches (arXiv 2010.11929, Figure 7)."""

    by_distance: list[tuple[float, float]]
    """Distance in patches, and mean cosine of the pairs that far apart."""
    correlation: float
    """Correlation of the cosine with the distance over all pairs."""
    grid: tuple[int, int]
    pictures: list[Picture]


class PatchFilters(msgspec.Struct, frozen=True):
    """Principal components of the filters of the patch embedding (arXiv 2010.11929, Figure 7)."""

    explained: list[float]
    """Share of the variance by component, the largest first."""
    smoothness: float
    """Correlation of neighboring pixels of a filter, about 0: 0 for noise, near 1 for smooth filters."""
    filters: int
    size: tuple[int, int]
    """Height and width of a filter in pixels."""
    pictures: list[Picture]

    @property
    def needed(self) -> int:
        """Number of components with 90 % of the variance."""
        reached = np.searchsorted(np.cumsum(self.explained), 0.9)
        return min(int(reached) + 1, len(self.explained))


class LayerScale(msgspec.Struct, frozen=True):
    """Mean magnitude of LayerScale (arXiv 2103.17239) by depth, of each residual branch."""

    layers: list[str]
    branches: dict[str, list[float]]


class TokenMixing(msgspec.Struct, frozen=True):
    """Weights by which a block mixes tokens, as maps over the patches (MLP-Mixer, ResMLP, gMLP)."""

    spread: list[float]
    """Standard distance, in patches, of the squared weights of a map from their center; mean by block."""
    uniform: float
    """Spread of weights that are equal everywhere."""
    grid: tuple[int, int]
    pictures: list[Picture]


class Excitation(msgspec.Struct, frozen=True):
    """Images that gradient ascent makes for a channel of what a block adds, averaged over the tokens."""

    blocks: list[int]
    channels: list[int]
    noise: list[float]
    """Value for the noise from which ascent starts."""
    most: list[float]
    """Largest value of an image of the data."""
    reached: list[float]
    images: int
    steps: int
    pictures: list[Picture]


class Inversion(msgspec.Struct, frozen=True):
    """Images made from the tokens after a block by gradient descent on their squared distance, by block.

    Distances are over the squared norm of the tokens, means over images.
    """

    blocks: list[int]
    noise: list[float]
    """Distance of the noise from which descent starts."""
    reached: list[float]
    shifted: list[float]
    """Distance of the image with Gaussian noise of 1/20 of the range of a pixel."""
    images: int
    steps: int
    pictures: list[Picture]

    @property
    def factors(self) -> list[float]:
        """Factor by which descent lowered the distance, by block."""
        return [noise / max(reached, 1e-12) for noise, reached in zip(self.noise, self.reached, strict=True)]


class Part(msgspec.Struct, frozen=True):
    """Scores without a part of a block."""

    name: str
    blocks: list[Score]
    """Without the part in one block."""
    everywhere: Score
    """Without it in all blocks."""


class Parts(msgspec.Struct, frozen=True):
    """Worth of the parts of a block: accuracy and loss in trained order without them."""

    trained: Score
    parts: list[Part]
    images: int
