"""Copies of each block that a fleet needs, by the availability of its boards.

Eight boards, each lost for a minute at a time, and models of eight blocks. For each availability and model: the fewest
copies of each block with which 99.9 % of the requests get a whole answer, and those with which 99.9 % get an answer of
at least 95 % of the model's accuracy, from the probability of each set of boards that are up. How many blocks may be
missing for the latter is measured (``eval --keep``).

The models: *any order* may run its blocks in every order (``examples/cifar10``), *in bands* all but the first and the
last (``examples/cifar10-plain``), *shared* has one block for all steps, so a copy of it is a copy of all
(``examples/cifar10-shared``), *fixed order* runs in trained order with copies of tokens on the way, and never skips.
*Restarts* is a fixed order without such copies, whose source starts a request again when the board that has it is lost.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import altair as alt
from rich.console import Console

from benchmarks.common import new_table, report_progress
from ls_edge.evaluation.simulation_summary import FleetSettings
from ls_edge.report.charts import svg_of
from ls_edge.report.charts.specification import category_color, chart_of, row_of
from ls_edge.runtime.fleet.planning.problem import PlannedDevice, PlanningProblem
from ls_edge.runtime.fleet.planning.survival import completed_share
from ls_edge.runtime.fleet.simulation.sites import plan_site
from ls_edge.runtime.fleet.simulation.targets import FleetChoice, Target, judge_fleet
from ls_edge.runtime.simulator.churn import Churn

BOARDS = BLOCKS = 8
DOWN_S, BUDGET_MS = 60.0, 2000.0
AVAILABILITIES = (0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
GOAL = 0.999
CHECKED = (0.8, "any order")
"""Availability and model that are simulated, too."""
FIGURE = Path(__file__).parents[1] / "docs" / "images" / "copies.svg"


class Model(NamedTuple):
    """A model, and the blocks that may be missing at 95 % of its accuracy."""

    name: str
    policy: str
    skips: int
    bands: tuple[tuple[int, ...], ...] = ()
    restart_s: float | None = None
    """Time of a request that starts again when its board is lost; None if copies of tokens are kept."""


MODELS = (
    Model("any order", "nearest", 6),
    Model("in bands", "nearest", 1, ((0,), (1, 2, 3, 4, 5, 6), (7,))),
    Model("shared", "nearest", 2),
    Model("fixed order", "sequential", 0),
    Model("restarts, requests of 0.5 s", "sequential", 0, restart_s=0.5),
    Model("restarts, requests of 1.5 s", "sequential", 0, restart_s=1.5),
)


def run(quick: bool) -> dict[str, Any]:
    """Find the copies of each case, draw them, and simulate the cases of one model and availability."""
    rows = []
    for availability in AVAILABILITIES:
        churn = Churn(DOWN_S * availability / (1 - availability), DOWN_S)
        for model in MODELS:
            for answers in ("whole", "95 % of the accuracy")[: 2 if model.skips else 1]:
                is_checked = (availability, model.name) == CHECKED and not quick
                copies, share, judged = _fewest(model, answers == "whole", churn, simulated=is_checked)
                row = {"availability": availability, "model": model.name, "answers": answers, "copies": copies}
                row |= {"share": share, "simulated": None}
                if judged is not None:
                    found = judged.whole if answers == "whole" else judged.answered
                    row["simulated"] = [judged.verdict, found.share, found.low, found.high]
                    report_progress(f"  {availability:.1%} {model.name}, {answers}: {row['simulated']}")
                rows.append(row)
    if not quick:
        FIGURE.write_text(svg_of(_chart(rows)), encoding="utf-8")
    return {"rows": rows, "goal": GOAL, "boards": BOARDS, "blocks": BLOCKS}


def _fewest(
    model: Model, is_whole: bool, churn: Churn, *, simulated: bool
) -> tuple[int | None, float | None, FleetChoice | None]:
    board = PlannedDevice("board", 4.0, BLOCKS, visit_ms=1.6, wire_ms=0.6, runtime_ms=0.6, runtime_mean_ms=0.6)
    source = PlannedDevice("source", 1.0, 0, stem_ms=1.0, visit_ms=1.0, wire_ms=0.6)
    problem = PlanningProblem((board,), BLOCKS, bands=model.bands, source=source)
    settings = FleetSettings(
        devices=BOARDS, requests=1, policy=model.policy, max_skips=0 if is_whole else model.skips,
        budget_ms=BUDGET_MS, rate=1 / DOWN_S, outage_s=DOWN_S,
    )  # fmt: skip
    target = Target("whole" if is_whole else "answered", GOAL)
    for copies in range(1, BOARDS + 1):
        if model.name == "shared":  # a board with the block has all steps
            own, placement, kinds = plan_site(problem, copies, (0,) * copies, churn=[churn], exactly=True)
        else:
            # As few blocks on a board as possible, so that all boards are used.
            room = dataclasses.replace(board, capacity=copies * BLOCKS / BOARDS)
            spread = dataclasses.replace(problem, devices=(room,))
            own, placement, kinds = plan_site(spread, copies, (0,) * BOARDS, churn=[churn], exactly=True)
        misses = _expected_misses(placement, churn, settings.max_skips)
        if model.restart_s is not None:
            misses += (1 - misses) * (1 - completed_share(churn.up, model.restart_s, BUDGET_MS / 1e3))
        if misses <= 1 - GOAL:
            judged = judge_fleet(own, placement, kinds, [target], settings, [churn], None) if simulated else None
            return copies, 1 - misses, judged
    return None, None, None


def _expected_misses(placement: Mapping[str, Sequence[int]], churn: Churn, skips: int) -> float:
    """Return the probability that more blocks than may be missing have no holder, whatever the budget."""
    held = [frozenset(blocks) for blocks in placement.values()]
    misses = 0.0
    for states in itertools.product((True, False), repeat=len(held)):
        left = frozenset().union(*itertools.compress(held, states))
        if BLOCKS - len(left) > skips:
            misses += math.prod(1 - churn.loss if up else churn.loss for up in states)
    return misses


def _chart(rows: list[dict[str, Any]]) -> Any:
    names = list(dict.fromkeys(_name(row) for row in rows))
    data = [
        row_of(digits=4, x=f"{row['availability']:.1%}", copies=row["copies"], what=_name(row))
        for row in rows
        if row["copies"]
    ]
    order = [f"{availability:.1%}" for availability in AVAILABILITIES]
    return (
        chart_of(data)
        .mark_bar()
        .encode(
            x=alt.X("x:N", sort=order, title="availability of a board", axis=alt.Axis(labelAngle=0)),
            xOffset=alt.XOffset("what:N", sort=names),
            y=alt.Y(
                "copies:Q",
                stack=False,  # cases of the same name have the same copies
                title="copies of each block",
                scale=alt.Scale(domain=[0, BOARDS]),
                axis=alt.Axis(tickCount=8),
            ),
            color=category_color(
                "what:N", names, legend=alt.Legend(title=None, orient="bottom", columns=2, labelLimit=0)
            ),
        )
        .properties(width=560, height=300)
    )


def _name(row: dict[str, Any]) -> str:
    """Return the bars of a case; several have the same copies."""
    if row["model"] == "shared" or row["model"] == MODELS[-1].name:
        return f"{row['model']}: whole answers"
    return "other models: whole answers" if row["answers"] == "whole" else f"{row['model']}: {row['answers']}"


def show(document: dict[str, Any], console: Console) -> None:
    """Print the table."""
    columns = list(dict.fromkeys(f"{row['availability']:.1%}" for row in document["rows"]))
    table = new_table(
        f"copies of each block for {document['goal']:.1%} of the answers, by availability of the boards",
        ("model", "answers", *columns), left=("model", "answers"),
    )  # fmt: skip
    cells: dict[tuple[str, str], list[str]] = {}
    for row in document["rows"]:
        cells.setdefault((row["model"], row["answers"]), []).append(
            "more than 8" if row["copies"] is None else str(row["copies"])
        )
    for (model, answers), found in cells.items():
        table.add_row(model, answers, *found)
    console.print(table)
