"""Errors of the parts of a bundle on a board, for its report: ``python -m ls_edge.engines.board_numbers BUNDLE``.

All engines are built twice, each time in an empty folder, and each part is compared with the reference outputs in the
bundle. Results are printed as soon as they are known.

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
    """Print the errors of all parts and of the whole chain, for two builds."""
    _say(f"power mode, which engines are tuned for: {Sensors().power_mode() or 'none'}")
    runs: dict[str, dict[str, np.ndarray]] = {}
    for build in ("first build", "second build"):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["LS_EDGE_CACHE"] = folder
            began = time.monotonic()
            with Pipeline.open(bundle) as pipeline:
                _say(f"{build}: {pipeline.choice}, ready after {time.monotonic() - began:.1f} s")
                runs[build] = reference_outputs(bundle, pipeline.executor.run)
                block = pipeline.executor.engines[0]
                if isinstance(block, TensorRTEngine):
                    _say(f"layers of block 0:\n{block.layers()}")
    expected = bundle.manifest.verified.get("outputs") or {}
    if not expected:
        _say("the bundle has no reference outputs, so runs are compared with the first build; export it again")
    for name, first in runs["first build"].items():
        against = np.asarray(expected.get(name, first))
        found = ", ".join(f"{run} {relative_error(outputs[name], against):.2e}" for run, outputs in runs.items())
        _say(f"{name}: relative error: {found}")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    set_up(as_json=False, level=logging.DEBUG)  # TensorRT's warnings, too
    try:
        print_errors(Bundle.open(sys.argv[1]))
    except EngineError as error:
        sys.exit(str(error))
