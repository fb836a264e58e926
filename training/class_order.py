"""Order of the classes in training, which determines the numbers of the model's outputs."""

from __future__ import annotations

from pathlib import Path

from ls_edge.core.errors import UsageError
from ls_edge.data.datasets import ImageSet, match_classes, natural_order, read_classes
from ls_edge.training.config import TrainConfig
from ls_edge.training.runs.checkpoint import CONFIG, read_record
from ls_edge.training.runs.initial_weights import InitialWeights


def is_foreign(source: str | None) -> bool:
    """Return whether weights do not come from a run, so that their classes have no names."""
    return source is not None and not (Path(source) / CONFIG).is_file()


def in_class_order(images: ImageSet, config: TrainConfig) -> ImageSet:
    """Return the images with classes in the order of the configuration or of the run that ``init`` names."""
    order, init = config.data.class_order, config.model.init
    names: tuple[str, ...] = images.classes
    if order == "natural":
        names = natural_order(names)
    elif order is None and init is not None and not is_foreign(init):
        known = read_record(init)[1].classes
        names = known if set(known) == set(names) else names
    elif order not in (None, "plain"):
        assert order is not None
        names = read_classes(order)
        unknown = [name for name in images.classes if name not in names]
        if unknown:
            raise UsageError(
                f"data.class_order {order} does not list {unknown[0]!r}, a class of {images.source}; add it"
            )
    return images if names == images.classes else match_classes(images, names)


def check_class_order(config: TrainConfig, images: ImageSet, initial: InitialWeights) -> None:
    """Raise :class:`UsageError` if a foreign classifier may number the classes in another order."""
    natural = natural_order(images.classes)
    is_sorted = list(images.classes) == sorted(images.classes)  # otherwise the data set determines the order
    if config.data.class_order is not None or natural == images.classes or not is_sorted:
        return
    init, teacher = config.model.init, config.teacher.model
    for given, numbers_them in (
        (f"--init {init}", initial.trained and is_foreign(init)),
        ("--pretrained", initial.trained and config.model.pretrained),
        (f"--teacher {teacher}", is_foreign(teacher)),
    ):
        if numbers_them:
            place = next(i for i, (a, b) in enumerate(zip(natural, images.classes, strict=True)) if a != b)
            raise UsageError(
                f"{given} has numbered classes without names, and class {place} of {config.data.source} is "
                f"{natural[place]!r} in timm's order (--class-order natural) and {images.classes[place]!r} "
                "in plain order (--class-order plain); name the order that it was trained with, or give a "
                "list (--class-order FILE)"
            )
