"""Errors of the parts of a bundle on a board, for its report: ``python -m ls_edge.engines.board_numbers BUNDLE``.

All engines are built in an empty folder, and each part is compared with the reference outputs in the bundle.

Not run on hardware yet.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time

import numpy as np

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import EngineError
from ls_edge.core.logs import set_up
from ls_edge.device.sensors import Sensors
from ls_edge.engines.measuring import reference_outputs
from ls_edge.engines.pipeline import Pipeline
from ls_edge.engines.reference import relative_error
from ls_edge.engines.tensorrt.engine import TensorRTEngine


def print_errors(bundle: Bundle) -> None:
    """Print the errors of all parts and of the whole chain, with newly built engines."""
    _say(f"power mode, which engines are tuned for: {Sensors().power_mode() or 'none'}")
    expected = bundle.manifest.verified.get("outputs") or {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LS_EDGE_CACHE"] = folder
        began = time.monotonic()
        with Pipeline.open(bundle) as pipeline:
            _say(f"{pipeline.choice}, ready after {time.monotonic() - began:.1f} s")
            block = pipeline.executor.engines[0]
            if isinstance(block, TensorRTEngine):
                _say(f"layers of block 0:\n{block.layers()}")
            reference_outputs(bundle, pipeline.executor.run)  # records CUDA graphs, which the second run uses
            for name, output in reference_outputs(bundle, pipeline.executor.run).items():
                _say(f"{name}: relative error: {relative_error(output, np.asarray(expected.get(name, output))):.2e}")
    if not expected:
        _say("the bundle has no reference outputs, so nothing was compared; export it again")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    set_up(as_json=False, level=logging.DEBUG)  # TensorRT's warnings, too
    try:
        print_errors(Bundle.open(sys.argv[1]))
    except EngineError as error:
        sys.exit(str(error))
