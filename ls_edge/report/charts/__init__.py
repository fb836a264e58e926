"""Charts of a report as Vega-Lite specifications (Altair), and as SVG files.

Each function returns None if there is nothing to draw. The size of a specification is bounded: long runs are binned or
sampled. Colors are Vega's schemes and CSS variables (:mod:`ls_edge.report.theme`). Needs the extra ``report``.

Names and other text from outside are data of a chart or string literals of an expression, never markup.
"""

from ls_edge.report.charts.accuracy_charts import (
    accuracy_by_class,
    accuracy_by_skips,
    accuracy_comparison,
    accuracy_figure,
    freedom_figure,
)
from ls_edge.report.charts.latency_charts import (
    latency_histogram,
    latency_over_time,
    outcomes_over_time,
)
from ls_edge.report.charts.specification import (
    MOST_POINTS,
    VEGA_LITE,
    spec_of,
    svg_of,
    with_parameters,
    write_svg,
)

__all__ = [
    "MOST_POINTS",
    "VEGA_LITE",
    "accuracy_by_class",
    "accuracy_by_skips",
    "accuracy_comparison",
    "accuracy_figure",
    "freedom_figure",
    "latency_histogram",
    "latency_over_time",
    "outcomes_over_time",
    "spec_of",
    "svg_of",
    "with_parameters",
    "write_svg",
]
