"""Replay every answer of a trace in one process and compare the logits; every peer that is named must have had a part.

    python -m tests.arm64.replay BUNDLE TRACE PEER PEER

Images are those of ``digits``; the tolerance is that of the whole system for float32, 1e-4 of the largest logit.
"""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np

from ls_edge import Bundle
from ls_edge.core.records import RequestRecord
from ls_edge.data.datasets import open_data
from ls_edge.data.preprocess import Preprocessor
from ls_edge.engines.pipeline import Pipeline
from tests.traces import read_trace, replay

TOLERANCE = 1e-4
"""Of the largest logit; what float32 allows between two engines."""


def main(folder: str, trace: str, *peers: str) -> str:
    """Return what was wrong; empty if every answer is confirmed and every peer ran blocks."""
    bundle = Bundle.open(folder)
    preprocess = Preprocessor(bundle.manifest.image)
    images = {image.name: image for image in open_data("digits", "eval").images}
    records = list(read_trace(trace))

    def image_of(record: RequestRecord) -> np.ndarray:
        image = images[record.image]
        return preprocess(image.read(), image.name)

    with Pipeline.open(bundle, threads=1, provider="cpu") as pipeline:
        errors = [found.error for found in replay(pipeline, records, image_of)]
    ran = Counter(holder for record in records for _, holder in record.steps)
    print(f"{len(records)} answers, blocks run by {dict(ran)}, largest error {max(errors, default=0):.2e}")  # noqa: T201
    failed = [record.error for record in records if record.error is not None or record.degraded]
    if not records or failed or len(errors) < len(records):
        return f"{len(records) - len(errors)} of {len(records)} requests without a complete answer: {failed[:1]}"
    if max(errors) > TOLERANCE:
        return f"an answer differs by more than {TOLERANCE:g} of the largest logit"
    idle = [peer for peer in peers if not ran[peer]]
    return f"ran no block: {', '.join(idle)}" if idle else ""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) or 0)
