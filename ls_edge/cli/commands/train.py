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
from ls_edge.cli.inputs import require_extras
from ls_edge.cli.output import print_json
from ls_edge.core.errors import UsageError, printable
from ls_edge.core.text import counted
from ls_edge.data.datasets import open_data
from ls_edge.report.terminal import open_console
from ls_edge.training.methods.registry import METHODS

if TYPE_CHECKING:
    from ls_edge.training.config import TrainConfig
    from ls_edge.training.progress import Summary


def _list_recipes(context: click.Context, _: click.Parameter, is_given: bool) -> None:
    """Print the name of each recipe and its first line, and end."""
    from ls_edge.training.config import find_recipe, recipe_names

    if is_given:
        for name in recipe_names():
            first = find_recipe(Path(name)).read_text(encoding="utf-8").splitlines()[0]
            click.echo(f"{name:28}  {first.lstrip('# ').partition(' docs/')[0]}")
        context.exit()


def _show_recipe(context: click.Context, _: click.Parameter, name: str | None) -> None:
    """Print a recipe, a file for --config, and end."""
    from ls_edge.training.config import find_recipe

    if name is not None:
        click.echo(find_recipe(Path(name)).read_text(encoding="utf-8"), nl=False)
        context.exit()


@click.command(
    cls=Command,
    examples=(
        "ls-edge train --data digits --out run",
        "ls-edge train --data photos --out run --model vit_tiny_patch16_224 --pretrained --epochs 10",
        "ls-edge train --config vit_b_cifar100 --data torch/cifar100 --out run",
        "ls-edge train --data digits --out run --set optim.clip=0.5 --set model.args.embed_dim=64",
        "ls-edge train --out run --resume",
    ),
)
@options.text("--data", "Folder of class folders, a tar of one, 'digits', or a torch/ or hfds/ data set.", "DATA")
@options.path("--out", "Folder of the run to write.", required=True, type=options.FOLDER, metavar="RUN")
@options.text("--model", "timm model, vit_digits, vit_cifar, or mixer_cifar.  [default for digits: vit_digits]", "NAME")
@options.count("--depth", "Number of blocks to keep, evenly spaced.", most=10_000, metavar="K")
@options.choice("--method", list(METHODS), "Training method.  [default: anyorder]")
@options.bands("one, or those of --init RUN")
@options.text("--init", "Run, .safetensors, or .pth file to start from.", "RUN_OR_FILE")
@options.text("--teacher", "Run or timm model to imitate.", "RUN_OR_NAME")
@options.text("--teacher-weights", "Weights of a timm teacher.  [default: timm's pretrained]", "FILE")
@options.choice(
    "--teacher-kind", ["hard", "soft"], "Target: the teacher's class or its probabilities.  [default: hard]"
)
@click.option("--pretrained", is_flag=True, default=None, help="Start from timm's pretrained weights.")
@options.count("--img-size", "Side of the images, in pixels.  [default: the model's]", most=16_384, metavar="PIXELS")
@options.count("--epochs", "Training epochs; 0 writes the model as it starts.  [default: 20]", least=0, most=10**9)
@options.count("--batch-size", "Images per step.  [default: 64]", most=options.MAX_BATCH)
@options.count("--accumulate", "Parts of a step, to need less memory.  [default: 1]", most=options.MAX_BATCH)
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
    help="Rotate photos upright by EXIF, in training and use.  [default: no, or as --init RUN]",
)
@click.option("--seed", type=click.IntRange(0), metavar="N", help="Seed of weights, orders, and batches.  [default: 0]")
@options.count("--seeds", "Number of runs to train, in RUN/seed-K, starting at --seed.", most=10_000)
@options.choice("--device", ["auto", "cpu", "cuda"], "Device to train on.  [default: auto]")
@options.choice("--precision", ["auto", "fp32", "bf16", "fp16"], "Type of the matrix products.  [default: auto]")
@options.count("--workers", "Processes that decode images.  [default: 0]", least=0, most=1024)
@options.threads("Torch threads on the CPU.")
@options.path("--config", "YAML file, or recipe of the paper, such as vit_b_cifar100; flags override it.")
@options.SET
@click.option(
    "--list-recipes", is_flag=True, is_eager=True, expose_value=False, callback=_list_recipes, help="List the recipes."
)
@click.option(
    "--show-recipe", metavar="NAME", is_eager=True, expose_value=False, callback=_show_recipe, help="Print a recipe."
)
@options.flag("--resume", "Continue the run in RUN with its own settings.")
@options.flag("--overwrite", "Replace the run in RUN.")
@options.JSON
def command(
    out: Path,
    config: Path | None,
    resume: bool,
    overwrite: bool,
    as_json: bool,
    seeds: int | None,
    set: tuple[str, ...],  # noqa: A002  the name of the option
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
    settings, named = read_config(None if config is None else find_recipe(config), flags, set)
    if not resume and not settings.data.source:
        raise UsageError("no data: give --data DATA, or name data.source in the --config file")
    require_extras("training", ("ls_edge.training.loop",), "train")
    if not resume and settings.data.source != "digits" and not named & {"model.name", "model.args", "model.init"}:
        from ls_edge.training.model_advice import model_advice

        advice = model_advice(open_data(settings.data.source, "train"))
        raise UsageError(f"no model: only 'digits' has a default one, vit_digits, for images of 16 pixels; {advice}")
    console = open_console(stderr=True)
    console.quiet = os.environ.get("RANK", "0") != "0"
    summaries: list[Any] = []
    for number in range(seeds or 1):
        run = out if seeds is None else out / f"seed-{settings.seed + number}"
        seeded = msgspec.structs.replace(settings, seed=settings.seed + number) if seeds else settings
        started = resume and (seeds is None or (run / "config.yaml").exists())
        summary = train_run(run, seeded, named, console, resume=started, overwrite=overwrite)
        if summary is not None and not console.quiet:
            summaries.append(summary)
    if as_json and summaries:
        print_json({"runs": summaries} if seeds else summaries[0])
        return
    for summary in summaries:
        _print(summary)


def train_run(
    out: Path, settings: TrainConfig, named: frozenset[str], console: Console, *, resume: bool, overwrite: bool
) -> Any:
    """Train one run and return its summary, or None if it is finished already."""
    from ls_edge.training.checkpoint import RESUME
    from ls_edge.training.loop import train
    from ls_edge.training.progress import Bars

    if resume:
        if other := other_setting(out, settings, named):
            raise UsageError(
                f"--resume continues with the settings of {out}, where {other}; leave it out, or start again in "
                "another folder with --init"
            )
        settings = _own_settings(out)
        if not (out / RESUME).is_file():
            console.print(f"{out} is finished: nothing to resume")
            return None
    try:
        with Bars(console) as listener:
            named_model = "model.name" in named
            return train(settings, out, listener=listener, resume=resume, overwrite=overwrite, model_named=named_model)
    except KeyboardInterrupt:
        if (out / RESUME).is_file():
            console.print(f"stopped; to continue, use the same command with --resume ({out})")
        raise


def other_setting(out: Path, asked: TrainConfig, named: frozenset[str]) -> str:
    """Return the first of the settings ``named`` that differs in the run, in words; empty if none does."""
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


def _print(s: Summary) -> None:
    if s.best_epoch is None:
        what = "as it starts, not trained"
    else:
        what = f"epoch {s.best_epoch} of {s.epochs}, validation cross-entropy {s.val_loss:.4f}"
    text = (
        f": {s.model}, {counted(s.blocks, 'block')}, {s.parameters / 1e6:.2f} million parameters, {s.method}: "
        f"{what}; {counted(s.images, 'image')}, {s.device}, {s.precision}, {s.seconds:.0f} s"
    )
    open_console().print(Text.assemble((printable(s.run), "bold"), printable(text)))
