"""Measurements on a board for its report: the error of each part, and the times of visits with all kinds of buffers.

``python -m ls_edge.engines.board_numbers errors BUNDLE`` builds all engines twice, each time in an empty folder. It
compares each part, with and without CUDA graphs, with the reference outputs in the bundle, and compares the logits of
both builds and of other splits with each other. ``visits BUNDLE usual|spin|blocking`` times visits of 1, 2, and all
blocks. Results are printed as soon as they are known.

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
from ls_edge.core.parts import HEAD, STEM, part_name
from ls_edge.core.text import counted
from ls_edge.device.sensors import Sensors
from ls_edge.engines.cuda.memory import CudaWorkspace
from ls_edge.engines.cuda.runtime import BLOCKING, SPIN, cuda_runtime
from ls_edge.engines.engine import signature_of
from ls_edge.engines.executor import Executor
from ls_edge.engines.measuring import reference_outputs, time_visits
from ls_edge.engines.pipeline import Pipeline
from ls_edge.engines.reference import noise_images, relative_error
from ls_edge.engines.tensorrt.build import EngineOptions, this_device
from ls_edge.engines.tensorrt.engine import TensorRTEngine, open_tensorrt

VISITS_S = 2.0
"""Seconds for which each variant of a visit is timed."""
_WAITS = {"usual": None, "spin": SPIN, "blocking": BLOCKING}


def errors(bundle: Bundle) -> None:
    """Print the errors of all parts and of the whole chain, for two builds, with and without graphs."""
    _say(f"power mode, which engines are tuned for: {Sensors().power_mode() or 'none'}")
    parts, image = (STEM, *range(bundle.num_blocks), HEAD), noise_images(bundle, 1)
    runs: dict[str, dict[str, np.ndarray]] = {}
    chains: dict[str, np.ndarray] = {}
    for build in ("first build", "second build"):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["LS_EDGE_CACHE"] = folder
            began = time.monotonic()
            with Pipeline.open(bundle) as pipeline:
                _say(f"{build}: {pipeline.choice}, ready after {time.monotonic() - began:.1f} s")
                run = pipeline.executor.run
                runs[build] = reference_outputs(bundle, run)
                chains[build] = run(parts, image)
                for split, dtype in (("a visit for each block", np.float32), ("float16 between blocks", np.float16)):
                    array = image
                    for slot, part in enumerate(parts, -1):
                        given = array.astype(dtype if part != STEM else np.float32).astype(np.float32)
                        array = run((part,), given, np.array([slot]))
                    chains[f"{build}, {split}"] = array
                block = pipeline.executor.engines[0]
                if not isinstance(block, TensorRTEngine):
                    continue
                _say(f"layers of block 0:\n{block.layers()}")
                pipeline.executor.drop_graphs("the report compares them")
                runs[f"{build}, no graphs"] = reference_outputs(bundle, run)
    expected = bundle.manifest.verified.get("outputs") or {}
    if not expected:
        _say("the bundle has no reference outputs, so runs are compared with the first build; export it again")
    first = runs["first build"]
    for name in first:
        against = np.asarray(expected.get(name, first[name]))
        found = ", ".join(f"{run} {relative_error(outputs[name], against):.2e}" for run, outputs in runs.items())
        _say(f"{name}: relative error: {found}")
    differences = (f"{what} {relative_error(logits, chains['first build']):.2e}" for what, logits in chains.items())
    _say(f"logits of honest boards differ, which audits have to tolerate: {', '.join(differences)}")


def visits(bundle: Bundle, wait: str) -> None:
    """Print the times of visits of TensorRT engines for each kind of buffer, with and without graphs."""
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
            shown = ", ".join(
                f"{counted(int(count), 'block')} {ms.p50:.3f} ms (p95 {ms.p95:.3f})" for count, ms in times.items()
            )
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
