"""Plans for ``ls-edge reproduce``: rows of training runs over data sets and seeds, and their cost.

A plan is a YAML file; ``plans/`` contains the plans of the package. Each training of a plan has an ordinary run folder
and an ordinary ``--config`` file (:meth:`Plan.config_of`), so ``ls-edge train`` alone can repeat it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from ls_edge.core import validation
from ls_edge.core.errors import UsageError
from ls_edge.training.config import ModelConfig, TrainConfig, find_recipe, override

if TYPE_CHECKING:
    from ls_edge.training.models.flops import WorkProfile

PLANS = Path(__file__).parent / "plans"
"""Plans of the package."""
START = "start"
"""Prefix of the folders of runs that rows start from."""


class PlanData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A data set; its numbers allow for an estimate of the cost without the data."""

    source: str = ""
    """DATA; empty if the user must give it."""
    images: int | None = None
    test_images: int | None = None
    classes: int | None = None


class PlanRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One training, repeated over the seeds."""

    data: str = ""
    """Name of the data set in the plan."""
    recipe: str | None = None
    """Recipe of the package, or a ``--config`` file."""
    config: dict[str, Any] = {}
    """Settings that override those of the recipe, as in a ``--config`` file."""
    figure: bool = True
    """Whether the figure includes this row; the table includes all rows."""


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A comparison."""

    title: str
    data: dict[str, PlanData]
    rows: dict[str, PlanRow]
    start: dict[str, PlanRow] = {}
    """Initial training of all rows of a data set, repeated over the seeds."""
    keep: list[int] | None = None
    """Numbers of blocks to keep in the evaluation; None for a quarter, a half, and three quarters."""

    def only(self, names: Sequence[str]) -> Plan:
        """Return the plan with only these rows and data sets, by default all; raise :class:`UsageError`."""
        unknown = [name for name in names if name not in self.rows and name not in self.data]
        if unknown:
            raise UsageError(
                f"--only {unknown[0]}: the plan has no such row or data set; rows are {', '.join(self.rows)}, data "
                f"sets {', '.join(self.data)}"
            )
        rows = {name: row for name, row in self.rows.items() if not names or name in names or row.data in names}
        used = {row.data for row in rows.values()}
        return msgspec.structs.replace(
            self,
            rows=rows,
            data={name: data for name, data in self.data.items() if name in used},
            start={name: row for name, row in self.start.items() if name in used},
        )

    def with_data(self, given: Mapping[str, str]) -> Plan:
        """Return the plan with other sources for its data sets; raise :class:`UsageError` for an unknown data set."""
        unknown = [name for name in given if name not in self.data]
        if unknown:
            raise UsageError(
                f"--data {unknown[0]}=...: the plan's data sets are {', '.join(self.data)}; name one of them"
            )
        data = {
            name: msgspec.structs.replace(item, source=given.get(name, item.source)) for name, item in self.data.items()
        }
        return msgspec.structs.replace(self, data=data)

    def config_of(self, name: str, flags: Mapping[str, Any], changes: Sequence[str]) -> str:
        """Return a ``--config`` file that repeats the training of a row or start with these flags."""
        starts = {f"{START}-{data}": row for data, row in self.start.items()}
        row = {**self.rows, **starts}[name]
        base = {} if row.recipe is None else yaml.safe_load(find_recipe(Path(row.recipe)).read_text("utf-8"))
        plain = copy.deepcopy(_merged(base, row.config))
        override(plain, flags, changes)
        return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def find_plan(name: str) -> Path:
    """Return the file of that name, or the packaged plan; raise :class:`UsageError` if there is neither."""
    path, packaged = Path(name), PLANS / f"{name.removesuffix('.yaml')}.yaml"
    if path.is_file():
        return path
    if len(path.parts) > 1 or not packaged.is_file():
        known = ", ".join(sorted(item.stem for item in PLANS.glob("*.yaml")))
        raise UsageError(f"no such file and no plan {name!r}; the plans are {known}")
    return packaged


def read_plan(path: Path) -> Plan:
    """Read a plan; raise :class:`ConfigError` with file, line, and column."""
    plan, source_map = validation.load_yaml(path, Plan)
    if not plan.rows:
        raise source_map.error("a plan needs at least one row", "rows")
    for section, rows in (("rows", plan.rows), (START, plan.start)):
        for name, row in rows.items():
            data = name if section == START else row.data
            if data not in plan.data:
                known = ", ".join(plan.data)
                raise source_map.error(f"{name}: data is {data!r}; the plan's data sets are {known}", section, name)
            if not name or "/" in name or name.startswith((".", f"{START}-")):
                raise source_map.error(
                    f"{name!r} is the name of a folder; leave out '/', a leading dot and 'start-'", section, name
                )
    return plan


def _merged(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(base)
    for key, value in over.items():
        old = found.get(key)
        found[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return found


class RowCost(msgspec.Struct, frozen=True):
    """Floating-point operations for one seed of a row, in matrix products and convolutions."""

    name: str
    training_flops: float
    """Forward and backward passes of all epochs, and the validation after each epoch."""
    evaluation_flops: float
    trained_images: int

    @property
    def flops(self) -> float:
        """Total operations of training and evaluation."""
        return self.training_flops + self.evaluation_flops


def cost_of(
    name: str,
    config: TrainConfig,
    *,
    images: int,
    test_images: int,
    classes: int,
    keep: Sequence[int] | None,
    orders: int,
) -> RowCost:
    """Count the operations of a training and its evaluation, by building the untrained model with torch.

    ``images`` includes the validation images that select the checkpoint.
    """
    from ls_edge.evaluation.measure import blocks_to_run
    from ls_edge.evaluation.orders import EvaluationOrders
    from ls_edge.evaluation.settings import EvaluationSettings
    from ls_edge.training.methods.registry import expected_cost, make_method

    chosen = config.chosen_method(could_share=config.model.has_weights)
    work = _work_of(msgspec.json.encode((config.model, chosen, config.method_args)), classes)
    method = make_method(chosen, config.method_args)
    held = round(images * config.data.validation)
    seen = (images - held) // config.batch_size * config.batch_size * config.epochs
    training = expected_cost(method, work) * work.forward * seen
    one = work.forward + work.num_blocks * work.added
    bands = config.block_bands(work.num_blocks)
    validation = config.epochs * held * len(method.validation(bands, config.validation_orders, config.seed)) * one
    kept = None if keep is None else tuple(count for count in keep if count <= work.num_blocks)
    plan = EvaluationOrders(EvaluationSettings(orders=orders, keep=kept), bands)
    runs = blocks_to_run(plan.all_orders()) * (work.block + work.added) + len(plan.all_orders()) * work.head
    return RowCost(name, training + validation, test_images * (work.stem + runs), seen)


@functools.cache
def _work_of(encoded: bytes, classes: int) -> WorkProfile:
    """Return the operations of a model from its JSON, which is the key of the cache and shared by many rows."""
    from ls_edge.training.methods.registry import make_method
    from ls_edge.training.models.families import evenly_spaced
    from ls_edge.training.models.small_models import build

    model, method, method_args = msgspec.json.decode(encoded, type=tuple[ModelConfig, str, dict[str, Any]])
    settings = {**model.args, "num_classes": classes}
    if model.img_size is not None:
        settings["img_size"] = model.img_size
    view = build(model.name, settings)
    if model.depth is not None:
        view.keep_blocks(evenly_spaced(view.num_blocks, model.depth))
    make_method(method, method_args).attach(view)
    return view.work
