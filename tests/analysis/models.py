"""Models of arrays whose analysis can be computed by hand."""

import numpy as np

from ls_edge.analysis import analyze
from ls_edge.analysis.plan import AnalysisPlan, AnalysisSettings
from ls_edge.core.bands import Bands

DIM = 6


class Residual:
    """Block i adds ``(1 + slot) tanh(x W_i)`` to tokens x; a block of zeros adds nothing."""

    tokens, classes = 4, 3

    def __init__(self, blocks=5, zeroed=()):
        rng = np.random.default_rng(0)
        self.num_blocks = blocks
        self.weights = rng.standard_normal((blocks, DIM, DIM)).astype(np.float32)
        self.weights[list(zeroed)] = 0
        self.classifier = rng.standard_normal((DIM, self.classes)).astype(np.float32)

    def stem(self, images):
        return images

    def block(self, index, tokens, slot):
        return tokens + np.tanh(tokens @ self.weights[index]) * np.float32(1 + slot)

    def head(self, tokens):
        return tokens.mean(axis=1) @ self.classifier

    def array_of(self, tokens):
        return tokens

    def run(self, images, order):
        """Block, slot, and tokens before and after each step of an order, and the logits."""
        steps, tokens = [], images
        for slot, block in enumerate(order):
            after = self.block(block, tokens, slot)
            steps.append((block, slot, tokens.astype(np.float64), after.astype(np.float64)))
            tokens = after
        return steps, self.head(tokens).astype(np.float64)


class Layers(Residual):
    """Block i adds ``tanh(x W_i)`` and ``mark`` in the direction of its slot; blocks of zeros add only the mark."""

    tokens = 3

    def __init__(self, blocks=4, zeroed=(), mark=0.0):
        super().__init__(blocks, zeroed)
        self.weights, self.mark = self.weights.astype(np.float64), mark

    def block(self, index, tokens, slot):
        return tokens + np.tanh(tokens @ self.weights[index]) + self.mark * np.eye(DIM)[slot]

    def head(self, tokens):
        return tokens.mean(axis=1)[:, : self.classes]


def drawn(model, count):
    """Random images, which are tokens, and labels."""
    rng = np.random.default_rng(1)
    images = rng.standard_normal((count, model.tokens, DIM)).astype(model.weights.dtype)
    return images, rng.integers(0, model.classes, count)


def plan_of(model, kinds, bands=None, **settings):
    """A plan for some kinds, by default in any order."""
    return AnalysisPlan(AnalysisSettings(what=tuple(kinds), **settings), bands or Bands(model.num_blocks))


def analyzed(model, *kinds, count=20, size=8, bands=None, **settings):
    """Some kinds of analysis of a model, on ``count`` random images in batches of ``size``."""
    images, labels = drawn(model, count)
    batches = [(images[at : at + size], labels[at : at + size]) for at in range(0, count, size)]
    return analyze(model, batches, plan_of(model, kinds, bands, **settings))


def softmax(logits):
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def numbers(value):
    """Return all numbers of a document, in its order."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [number for each in value for number in numbers(each)]
    return [value] if isinstance(value, (int, float)) else []
