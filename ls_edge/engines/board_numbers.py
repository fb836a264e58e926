"""Numbers of a board for its report: errors of each part, and times of visits in all ways to run them.

``python -m ls_edge.engines.board_numbers errors BUNDLE`` builds all engines twice in empty folders. It compares each
part with ONNX Runtime on the CPU, with and without CUDA graphs, and prints some values of each output, so that they can
be compared elsewhere: the inputs are the same everywhere. ``visits BUNDLE usual|spin|blocking`` times visits of 1, 2
and all blocks. Each line is printed as soon as it is known.

Not run on hardware yet.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence

import numpy as np

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import EngineError
from ls_edge.core.logs import set_up
from ls_edge.core.parts import HEAD, STEM, part_name
from ls_edge.engines.cuda.memory import CudaWorkspace
from ls_edge.engines.cuda.runtime import BLOCKING, SPIN, cuda_runtime
from ls_edge.engines.engine import signature_of
from ls_edge.engines.executor import Executor
from ls_edge.engines.measuring import noise_images, time_visits
from ls_edge.engines.pipeline import Pipeline, relative_error
from ls_edge.engines.tensorrt.build import EngineOptions, this_device
from ls_edge.engines.tensorrt.engine import TensorRTEngine, open_tensorrt

VISITS_S = 2.0
"""Seconds for which each way to run visits is timed."""
_SHOWN = 6
"""Values of each output that are printed."""
_WAITS = {"usual": None, "spin": SPIN, "blocking": BLOCKING}


def errors(bundle: Bundle) -> None:
    """Print the error of each part and of the whole chain, in two builds, with and without graphs."""
    parts = (STEM, *range(bundle.num_blocks), HEAD)
    image = noise_images(bundle, 1)
    given: list[np.ndarray] = []
    exact: list[np.ndarray] = []
    try:
        with Pipeline.open(bundle, kind="onnx", provider="cpu") as reference:
            given = [image, *reference.executor.steps(parts, image)[:-1]]
            exact = _outputs(reference, parts, given)
    except EngineError as error:
        _say(f"no reference: {error}")
    runs: dict[str, list[np.ndarray]] = {}
    for build in ("first", "second"):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["LS_EDGE_CACHE"] = folder
            began = time.monotonic()
            with Pipeline.open(bundle) as pipeline:
                _say(f"{build} build: {pipeline.choice}, ready after {time.monotonic() - began:.1f} s")
                given = given or [image, *pipeline.executor.steps(parts, image)[:-1]]
                runs[f"{build} build"] = _outputs(pipeline, parts, given)
                block = pipeline.executor.engines[0]
                if not isinstance(block, TensorRTEngine):
                    continue
                _say(f"layers of block 0:\n{block.layers()}")
                pipeline.executor.drop_graphs("the report compares them")
                runs[f"{build} build, no graphs"] = _outputs(pipeline, parts, given)
    for row, part in enumerate((*parts, None)):
        name = "chain" if part is None else part_name(part)
        outputs = {run: found[row] for run, found in runs.items()}
        first = next(iter(outputs.values()))
        against = exact[row] if exact else first
        found = ", ".join(f"{run} {relative_error(output, against):.2e}" for run, output in outputs.items())
        values = " ".join(f"{value:.6g}" for value in first.ravel()[:: max(1, first.size // _SHOWN)][:_SHOWN])
        _say(f"{name}: relative error: {found}; values: {values}")


def _outputs(pipeline: Pipeline, parts: Sequence[int], given: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the output of each part on its input of the reference, and of the chain."""
    run = pipeline.executor.run
    outputs = [run((part,), array) for part, array in zip(parts, given, strict=True) for _ in range(2)][1::2]
    return [*outputs, run(parts, given[0])]


def visits(bundle: Bundle, wait: str) -> None:
    """Print the times of visits of TensorRT engines, with all kinds of buffers, with and without graphs."""
    flag = _WAITS[wait]
    if flag is not None:  # before anything else uses the GPU
        cuda_runtime().call("cudaSetDeviceFlags", flag, doing=f"asking for {wait} waits")
    device, options = this_device(), EngineOptions.of(bundle)
    _say(f"{device}: {device.multiprocessors} multiprocessors, compute capability {device.capability}")
    signature = signature_of(bundle.manifest, "block 0")
    for is_mapped in (False, True) if cuda_runtime().is_integrated() else (False,):
        workspace = CudaWorkspace.for_bundle(bundle, options.max_batch, is_mapped=is_mapped)
        blocks = range(bundle.num_blocks)
        executor = Executor(
            {block: open_tensorrt(bundle, part_name(block), signature, options, workspace) for block in blocks}
        )
        for graphs in ("graphs", "no graphs"):
            if graphs == "no graphs":
                executor.drop_graphs("the report compares them")
            executor.warm_up(1)
            times = time_visits(bundle, blocks, 1, VISITS_S, executor.run)
            shown = ", ".join(f"{count} blocks {ms.p50:.3f} ms (p95 {ms.p95:.3f})" for count, ms in times.items())
            _say(f"{'mapped' if is_mapped else 'device'} buffers, {graphs}, {wait} waits: {shown}")
        executor.close()


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    set_up(as_json=False, level=logging.DEBUG)  # TensorRT's warnings, too
    opened = Bundle.open(sys.argv[2])
    try:
        errors(opened) if sys.argv[1] == "errors" else visits(opened, sys.argv[3])
    except EngineError as error:
        sys.exit(str(error))
