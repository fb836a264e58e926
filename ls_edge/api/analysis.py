"""``ls_edge.analyze``: the contribution of each block, and its dependence on position."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console

from ls_edge.analysis import KINDS, Analysis, check_kinds
from ls_edge.analysis import analyze as measure
from ls_edge.analysis.overview import print_analysis
from ls_edge.analysis.plan import AnalysisPlan, AnalysisSettings
from ls_edge.api.models import OpenedModel, is_bundle, open_model
from ls_edge.core.files import local_folder
from ls_edge.core.logs import OnProgress, OnWarning, ignore_progress, warn_in_python
from ls_edge.data.datasets import ImageSet, open_data
from ls_edge.report.shown import Shown

if TYPE_CHECKING:
    from ls_edge.training.inspection.inspected import Inspected


class AnalysisResult(Shown, Analysis, frozen=True):
    """The function of each block of a model; see :class:`Analysis`."""

    def show(self, console: Console) -> None:
        """Print the verdict, a row for each block, and the agreement of answers."""
        print_analysis(self, console)

    def chart(self) -> str:
        """Return the importance of each block as an SVG; empty without it."""
        from ls_edge.report.charts import svg_of

        drawn = [] if self.importance is None else KINDS["importance"].charts(self.importance)
        return svg_of(drawn[0]) if drawn else ""


def analyze(
    model: str | Path,
    data: str | Path | ImageSet,
    *,
    on_progress: OnProgress = ignore_progress,
    on_warning: OnWarning = warn_in_python,
    **settings: Any,
) -> AnalysisResult:
    """Analyze the blocks of a run or bundle, as ``ls-edge analyze``.

    ``settings`` are fields of :class:`AnalysisSettings`, such as ``what`` or ``limit``.
    """
    asked = AnalysisSettings.of(settings)
    asked = msgspec.structs.replace(asked, what=check_kinds(asked.what))
    images = data if isinstance(data, ImageSet) else open_data(str(data), "eval")
    if len(images) < (asked.limit or 0):  # answers to the same image would count as independent ones in tests
        asked = msgspec.structs.replace(asked, limit=None)
    with open_model(local_folder(model), asked, on_warning) as opened:
        plan = AnalysisPlan(asked, asked.bands_of(opened.bands))
        some = opened.images(images)
        found = measure(
            opened.blocks,
            opened.batches(some),
            plan,
            inspected=_inspected(opened, plan, on_progress),
            on_batch=lambda done: on_progress(done, len(some), "images"),
            on_kind=on_progress,
        )
        more = {
            "skipped": len(opened.skipped),
            "settings": opened.settings(some, plan.bands),
        }
    return AnalysisResult(**{**msgspec.structs.asdict(found), **more})


def _inspected(opened: OpenedModel, plan: AnalysisPlan, on_progress: OnProgress) -> Inspected | None:
    """Return the run to inspect; None for a bundle."""
    if is_bundle(opened.folder):
        return None
    from ls_edge.training.inspection.inspected import Inspected
    from ls_edge.training.models.torch_blocks import TorchBlocks

    assert isinstance(opened.blocks, TorchBlocks)
    return Inspected(opened.blocks, plan.bands, plan.settings.seed, opened.record.image, on_progress)
