"""``ls-edge train``: from images to a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import Console
from rich.text import Text

from ls_edge.cli import options
from ls_edge.cli.command import Command
from ls_edge.core.errors import UsageError, printable
from ls_edge.device.requirements import install_command
from ls_edge.report.formatting import counted
from ls_edge.report.terminal import open_console
from ls_edge.training.methods.registry import METHODS

if TYPE_CHECKING:
    from ls_edge.training.config import TrainConfig


@click.command(
    cls=Command,
    examples=(
        "ls-edge train --data digits --out run",
        "ls-edge train --data photos --out run --model vit_tiny_patch16_224 --pretrained --epochs 10",
        "ls-edge train --config vit_b_cifar100 --out run",
        "ls-edge train --out run --resume",
    ),
)
@click.option(
    "--data", metavar="DATA", help="Folder of class folders, a tar of one, 'digits', or a torch/ or hfds/ data set."
)
@options.path("--out", "Folder of the run to write.", required=True, type=options.FOLDER, metavar="RUN")
@click.option(
    "--model", metavar="NAME", help="timm model, vit_digits, vit_cifar, or mixer_cifar.  [default: vit_digits]"
)
@options.count("--depth", "Number of blocks to keep, evenly spaced.", most=10_000, metavar="K")
@options.choice("--method", list(METHODS), "Training method.  [default: anyorder]")
@options.bands("one, or those of --init RUN")
@click.option("--init", metavar="RUN_OR_FILE", help="Run, .safetensors, or .pth file to start from.")
@click.option("--teacher", metavar="RUN_OR_NAME", help="Run or timm model to imitate, convolutional or not.")
@click.option("--teacher-weights", metavar="FILE", help="Weights of a timm teacher.  [default: timm's pretrained]")
@options.choice(
    "--teacher-kind", ["hard", "soft"], "Target: the teacher's class or its probabilities.  [default: hard]"
)
@click.option("--pretrained", is_flag=True, default=None, help="Start from timm's pretrained weights.")
@options.count("--img-size", "Side of the images, in pixels.  [default: the model's]", most=16_384, metavar="PIXELS")
@options.count("--epochs", "Training epochs; 0 writes the model as it starts.  [default: 20]", least=0, most=10**9)
@options.count("--batch-size", "Images per step.  [default: 64]", most=options.MAX_BATCH)
@click.option("--lr", type=options.Number(), metavar="X", help="Peak learning rate.  [default: the model's]")
@click.option("--weight-decay", type=options.Number(), metavar="X", help="Weight decay of matrices.  [default: 0.05]")
@options.choice(
    "--augment",
    ["auto", "none", "shift", "crop", "timm"],
    "Augmentation: small shifts; crops and flips; or timm's, with RandAugment.  [default: auto]",
)
@click.option(
    "--exif-orientation/--no-exif-orientation",
    default=None,
    help="Photos turned upright by EXIF, in training and use.  [default: no, or as --init RUN]",
)
@click.option("--seed", type=click.IntRange(0), metavar="N", help="Seed of weights, orders, and batches.  [default: 0]")
@options.count("--seeds", "Number of runs to train, in RUN/seed-K, starting at --seed.", most=10_000)
@options.choice("--device", ["auto", "cpu", "cuda"], "Device to train on.  [default: auto]")
@options.count("--workers", "Processes that decode images.  [default: 0]", least=0, most=1024)
@options.threads("Torch threads on the CPU.")
@options.path("--config", "YAML file, or recipe of the paper, such as vit_b_cifar100; flags override it.")
@click.option("--resume", is_flag=True, help="Continue the run in RUN with its own settings.")
@click.option("--overwrite", is_flag=True, help="Replace the run in RUN.")
@options.JSON
def command(
    out: Path,
    config: Path | None,
    resume: bool,
    overwrite: bool,
    as_json: bool,
    seeds: int | None,
    **flags: Any,
) -> None:
    """Fine-tune a vision transformer with shuffled block order.

    Writes the folder RUN: model.safetensors, config.yaml, metrics.jsonl. The checkpoint with the lowest cross-entropy
    on a seeded tenth of DATA is kept. --resume continues a stopped run to the same result. To use several GPUs:
    torchrun --nproc-per-node N -m ls_edge train ...
    """
    from ls_edge.training.config import find_recipe, read_config

    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other; leave one out")
    settings, named = read_config(None if config is None else find_recipe(config), flags)
    if not resume and not settings.data.source:
        raise UsageError("no data: give --data DATA, or name data.source in the --config file")
    try:
        from ls_edge.training import loop  # noqa: F401 - to see whether it can be imported
    except ImportError as error:
        raise UsageError(f"training needs {error.name}; to install it: {install_command('train')}") from None

    console = open_console(stderr=True)
    console.quiet = os.environ.get("RANK", "0") != "0"
    summaries: list[Any] = []
    for number in range(seeds or 1):
        run = out if seeds is None else out / f"seed-{settings.seed + number}"
        seeded = msgspec.structs.replace(settings, seed=settings.seed + number) if seeds else settings
        started = resume and (seeds is None or (run / "config.yaml").exists())
        summaries.append(train_run(run, seeded, named, console, resume=started, overwrite=overwrite))
    summaries = [summary for summary in summaries if summary is not None]
    if os.environ.get("RANK", "0") != "0" or not summaries:
        return
    if as_json:
        document = {"runs": summaries} if seeds else summaries[0]
        click.echo(msgspec.json.format(msgspec.json.encode(document), indent=1).decode())
        return
    for summary in summaries:
        _print(summary)


def train_run(
    out: Path, settings: TrainConfig, named: frozenset[str], console: Console, *, resume: bool, overwrite: bool
) -> Any:
    """Train one run and return its summary; None where it is finished already."""
    from ls_edge.training.checkpoint import RESUME
    from ls_edge.training.loop import train
    from ls_edge.training.progress import Bars

    if resume:
        settings = _settings_of(out, settings, named)
        if not (out / RESUME).is_file():
            console.print(f"{out} is finished: nothing to resume", soft_wrap=True)
            return None
    try:
        with Bars(console) as listener:
            return train(
                settings, out, listener=listener, resume=resume, overwrite=overwrite,
                model_named="model.name" in named,
            )  # fmt: skip
    except KeyboardInterrupt:
        if (out / RESUME).is_file():
            console.print(f"stopped; go on with the same command and --resume ({out})", soft_wrap=True)
        raise


def _settings_of(out: Path, asked: TrainConfig, named: frozenset[str]) -> TrainConfig:
    """The run's own settings; raises :class:`UsageError` where a flag asks for others."""
    other = other_setting(out, asked, named)
    if other:
        raise UsageError(
            f"--resume goes on with the settings of {out}, where {other}; leave it out, or start anew in another "
            "folder with --init"
        )
    return _own_settings(out)


def other_setting(out: Path, asked: TrainConfig, named: frozenset[str]) -> str:
    """The first of the settings ``named`` that the run has otherwise, in words; empty where it has them as asked."""
    own = _own_settings(out)
    for name in sorted(named - {"data.workers"}):
        value, was = asked, own
        for step in name.split("."):
            value, was = getattr(value, step), getattr(was, step)
        if value != was:
            return f"{name} is {was!r}, not {value!r}"
    return ""


def _own_settings(out: Path) -> TrainConfig:
    from ls_edge.training.checkpoint import read_record
    from ls_edge.training.config import TrainConfig

    file, _ = read_record(out)
    return TrainConfig(**{name: getattr(file, name) for name in TrainConfig.__struct_fields__})


def _print(summary: Any) -> None:

    s = summary
    if s.best_epoch is None:
        what = "as it starts, not trained"
    else:
        what = f"epoch {s.best_epoch} of {s.epochs}, validation cross-entropy {s.val_loss:.4f}"
    text = (
        f": {s.model}, {counted(s.blocks, 'block')}, {s.parameters / 1e6:.2f} million parameters, {s.method}: "
        f"{what}; {counted(s.images, 'image')}, {s.device}, {s.precision}, {s.seconds:.0f} s"
    )
    open_console().print(Text.assemble((printable(s.run), "bold"), printable(text)))
