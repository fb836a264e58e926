"""``ls_edge.evaluate``: accuracy in trained order, in random orders, and with blocks missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from ls_edge.api.models import model_folders, open_model
from ls_edge.core.errors import UsageError, printable
from ls_edge.core.logs import OnProgress, OnWarning, ignore_progress, warn_in_python
from ls_edge.core.text import counted, format_bands
from ls_edge.data.datasets import ImageSet, open_data
from ls_edge.evaluation.evaluate import Evaluation, aggregate
from ls_edge.evaluation.evaluate import evaluate as measure
from ls_edge.evaluation.measure import starts_of
from ls_edge.evaluation.orders import EvaluationOrders
from ls_edge.evaluation.settings import EvaluationSettings
from ls_edge.report.evaluation import evaluation_remarks, print_evaluation
from ls_edge.report.shown import Shown


class EvaluationResult(Shown, Evaluation, frozen=True):
    """Accuracy of a model, or means over models trained with several seeds; see :class:`Evaluation`."""

    def show(self, console: Console) -> None:
        """Print a row for each group of orders."""
        print_evaluation(self, console)
        for remark in evaluation_remarks(self):
            console.print(remark)

    def chart(self) -> str:
        """Return the figure of ``eval --figure`` as an SVG."""
        from ls_edge.report.charts import accuracy_figure, freedom_figure, svg_of

        return svg_of((freedom_figure if self.freedom else accuracy_figure)([self]))


def evaluate(
    model: str | Path,
    data: str | Path | ImageSet,
    *,
    on_progress: OnProgress = ignore_progress,
    on_warning: OnWarning = warn_in_python,
    **settings: Any,
) -> EvaluationResult:
    """Evaluate a run, a bundle, or a folder of runs (means over its models), as ``ls-edge eval``.

    ``settings`` are fields of :class:`EvaluationSettings`, such as ``orders`` or ``keep``. ``data`` is a folder of
    class folders, a tar of one, ``digits``, or a timm data set. A bundle runs on the engines of this machine and needs
    no torch.
    """
    asked = EvaluationSettings.of(settings)
    images = data if isinstance(data, ImageSet) else open_data(str(data), "eval")
    results: list[Evaluation] = []
    for folder in model_folders(Path(model)):
        with open_model(folder, asked, on_warning) as opened:
            plan = EvaluationOrders(asked, opened.bands)
            if results:
                check_alike(results[0], folder, plan)
            some, orders = opened.images(images), plan.all_orders()

            def tell(done: int, count: int = len(some), text: str = counted(len(orders), "order")) -> None:
                on_progress(done, count, text)

            found = measure(opened.blocks, opened.batches(some), plan, opened.record.classes, on_batch=tell)
            in_force = opened.settings(some, plan.bands)
            in_force |= {"keep": list(plan.keep), "block_runs": len(starts_of(orders))}
            results.append(msgspec.structs.replace(found, skipped=len(opened.skipped), settings=in_force))
    result = results[0] if len(results) == 1 else aggregate(results)
    named = {"name": Path(model).name, "settings": {**result.settings, "of": printable(model)}}
    return EvaluationResult(**{**msgspec.structs.asdict(result), **named})


def check_alike(like: Evaluation, path: Path, plan: EvaluationOrders) -> None:
    """Raise :class:`UsageError` if the model of ``path`` and a plan for it cannot be averaged with ``like``."""
    s, bands = like.settings, plan.bands
    freedom = [step.bands for step in like.freedom or ()] == [each.to_json() for each in plan.freedom]
    if s["blocks"] != bands.num_blocks or s["bands"] != bands.to_json() or not freedom:
        raise UsageError(
            f"{path} has {counted(bands.num_blocks, 'block')} in the bands {bands}, and {s['of']} has "
            f"{s['blocks']} in the bands {format_bands(s['bands'])}, so there is no mean over them; name the runs "
            "instead of their folder"
        )
