"""Tokens, and the results of a chain of blocks on the CPU, to compare engines with."""

from collections import Counter

import numpy as np
import onnxruntime

ORDER = (0, 1, 2, 3, 4, 5)


def tokens(batch=1, seed=0):
    return np.random.default_rng(seed).standard_normal((batch, 16, 32), dtype=np.float32)


def expected(exact, order, given):
    for block in order:
        given = exact.block(block, given)
    return given


def close(ours, theirs):
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


def counted(gpu, call):
    """Return the result of a call, and the calls of CUDA that the double counted."""
    before = Counter(gpu.counts)
    result = call()
    return result, gpu.counts - before


def plain(bundle, part, inputs):
    """Return the result of a part in a plain session of ONNX Runtime."""
    session = onnxruntime.InferenceSession(bundle.read(part), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0]
