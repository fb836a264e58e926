"""Settings of exports: each is a flag of the command and an argument of the function."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from ls_edge.core.errors import UsageError
from ls_edge.core.validation import Settings, flag

MAX_BATCH = 8
"""Default maximum batch size, for verification and for TensorRT engines."""


class ExportSettings(Settings, frozen=True, kw_only=True):
    """Settings of an export."""

    precision: Annotated[
        Literal["fp32", "fp16", "int8"],
        flag("Precision of the engines: fp16 for GPUs, int8 for CPUs."),
    ] = "fp32"
    engine: Annotated[Literal["onnx", "tensorrt"], flag("Target engine; determines how int8 is written.")] = "onnx"
    max_batch: Annotated[
        Annotated[int, Meta(ge=1, le=65_536)], flag("Largest batch to verify and to build engines for.")
    ] = MAX_BATCH
    bands: Annotated[
        str | None,
        flag("Groups in which blocks may be reordered, such as 0/1-6/7.  [default: those of the run]", "BANDS"),
    ] = None
    fold_ends: Annotated[bool, flag("Fold a small first band into the stem, and a small last one into the head.")] = (
        False
    )
    whole: Annotated[bool, flag("Also write the model as one file, whole.onnx.")] = False

    @property
    def is_explicit(self) -> bool:
        """Whether blocks are quantized with fixed scales, in half precision."""
        return self.precision == "int8" and self.engine == "tensorrt"

    @property
    def halves_blocks(self) -> bool:
        """Whether blocks are rewritten to float16, except for nodes that must run in float32 or int8."""
        return self.precision == "fp16" or self.is_explicit

    def check(self, *, is_calibrated: bool) -> None:
        """Raise :class:`UsageError` if the settings need calibration images and there are none."""
        if self.is_explicit and not is_calibrated:
            raise UsageError("int8 for TensorRT needs ranges of activations; give images with --calibrate DATA")
