"""``ls-edge train``: from images to a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import Console
from rich.text import Text

from ls_edge.api.training import read_settings, resumed_settings, train_run
from ls_edge.cli import options
from ls_edge.cli.command import Command
from ls_edge.cli.output import print_json
from ls_edge.core.errors import printable
from ls_edge.report.progress import StepProgress
from ls_edge.report.terminal import open_console
from ls_edge.training.methods.registry import METHODS, find_method

if TYPE_CHECKING:
    from ls_edge.training.config import TrainConfig
    from ls_edge.training.progress import TrainingResult


def _list_recipes(context: click.Context, _: click.Parameter, is_given: bool) -> None:
    """Print the file and the first line of each recipe, and end the command."""
    from ls_edge.training.config import RECIPES

    if is_given:
        for path in sorted(RECIPES.glob("*.yaml")):
            first = path.read_text(encoding="utf-8").splitlines()[0]
            click.echo(f"{path.stem:28}  {first.lstrip('# ').partition(' docs/')[0]}  {path}")
        context.exit()


@click.command(
    cls=Command,
    examples=(
        "ls-edge train --data digits --out run",
        "ls-edge train --data photos --out run --model vit_tiny_patch16_224",
        "ls-edge train --config vit_b_cifar100 --data torch/cifar100 --out run",
        "ls-edge train --data digits --out run --set model.args.embed_dim=64",
        "ls-edge train --out run --resume",
    ),
)
@options.text("--data", "Folder of class folders, a tar of one, 'digits', or a torch/ or hfds/ data set.", "DATA")
@options.output_folder("Folder of the run to write.", required=True, metavar="RUN")
@options.text("--model", "timm model, vit_digits, vit_cifar, or mixer_cifar.  [default for digits: vit_digits]", "NAME")
@options.count("--depth", "Number of blocks to keep, evenly spaced.", most=10_000, metavar="K")
@click.option(
    "--method",
    type=options.Named(list(METHODS), find_method),
    metavar="METHOD",
    help=f"{', '.join(METHODS)}, or package.module:Class.  [default: shared if the start was trained in one order, "
    "else anyorder]",
)
@options.text(
    "--bands",
    "Groups in which blocks may be reordered, such as 0/1-6/7.  [default: as in --init RUN, else the method's]",
    "BANDS",
)
@options.text("--init", "Run, .safetensors, or .pth file to start from.", "RUN_OR_FILE")
@options.text("--teacher", "Run or timm model to imitate.", "RUN_OR_NAME")
@click.option("--pretrained", is_flag=True, default=None, help="Start from timm's pretrained weights.")
@options.count("--epochs", "Training epochs; 0 writes the model as it starts.  [default: 20]", least=0, most=10**9)
@options.count("--batch-size", "Images per step.  [default: 64]", most=options.MAX_BATCH)
@options.number("--lr", "Peak learning rate.  [default: the model's]", "X", above=True)
@options.count("--img-size", "Side of the images.  [default: the model's]", most=16_384, metavar="PIXELS")
@options.count("--accumulate", "Parts of a step that run in sequence, to save memory.  [default: 1]", most=65_536)
@options.text("--class-order", "Order of classes: 1, 10, 2, timm's 1, 2, 10, or a file's lines.", "plain|natural|FILE")
@options.count("--workers", "Processes that decode images.  [default: 0; with a GPU up to 8]", least=0, most=1024)
@click.option("--seed", type=click.IntRange(0), metavar="N", help="Seed of weights, orders, and batches.  [default: 0]")
@options.count("--seeds", "Number of runs to train, in RUN/seed-K, starting at --seed.", most=10_000)
@options.choice("--device", ["auto", "cpu", "cuda"], "Device to train on.  [default: auto]")
@options.choice("--precision", ["auto", "fp32", "bf16", "fp16"], "Type of the matrix products.  [default: auto]")
@options.threads("Torch threads on the CPU.")
@options.path("--config", "YAML file, or recipe of the paper, such as vit_b_cifar100; flags override it.")
@options.text(
    "--set", "Any setting of the configuration, such as optim.clip=0.5; may be repeated.", "KEY=VALUE", multiple=True
)
@click.option(
    "--recipes",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_recipes,
    help="List the recipes and their files.",
)
@options.choice("--log", ["tensorboard"], "Destination of additional curves: by order and blocks kept.")
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
    img_size: int | None,
    **flags: Any,
) -> None:
    """Fine-tune a vision transformer with shuffled block order.

    Writes the folder RUN: model.safetensors, config.yaml, metrics.jsonl. The checkpoint with the lowest cross-entropy
    on a seeded tenth of DATA is kept. --resume continues a stopped run to the same result. To use several GPUs:
    torchrun --nproc-per-node N -m ls_edge train ...
    """
    changes = set if img_size is None else (f"model.args.img_size={img_size}", *set)
    asked = like = read_settings(config, flags, changes, resume=resume, overwrite=overwrite)
    console = open_console(stderr=True)
    console.quiet = os.environ.get("RANK", "0") != "0"
    results: list[TrainingResult] = []
    for seed in range(asked[0].seed, asked[0].seed + (seeds or 1)):
        run = out if seeds is None else out / f"seed-{seed}"
        started = resume and (seeds is None or (run / "config.yaml").exists())
        settings, named = asked if started else like
        seeded = msgspec.structs.replace(settings, seed=seed)
        result = train_with_bars(run, seeded, named, console, resume=started, overwrite=overwrite)
        if started:  # seeds that have no run yet are trained like this one
            own = resumed_settings(run, *asked)
            if own.data.split_seed == seed:  # the default, by which each seed has its own validation images
                data = msgspec.structs.replace(own.data, split_seed=asked[0].data.split_seed)
                own = msgspec.structs.replace(own, data=data)
            like = own, named | {"model.name"}
        if result is not None and not console.quiet:
            results.append(result)
    if as_json and not console.quiet:
        print_json({"runs": results} if seeds else next(iter(results), None))
        return
    for result in results:
        result.show(open_console())


def train_with_bars(
    out: Path, settings: TrainConfig, named: frozenset[str], console: Console, *, resume: bool, overwrite: bool
) -> TrainingResult | None:
    """Train one run with its progress on the console; return its result, or None if it is finished already."""
    from ls_edge.training.progress import Reporter

    def warn(text: str) -> None:
        console.print(Text.assemble(("warning: ", "yellow"), printable(text)))

    try:
        with StepProgress("train", console=console, line_every_s=60) as progress:
            reporter = Reporter(
                lambda metrics, epochs: console.print(metrics.line(epochs)),
                progress,
                warn,
                lambda text: console.print(printable(text)),
            )
            result = train_run(out, settings, named, reporter, resume=resume, overwrite=overwrite)
    except KeyboardInterrupt:
        if (out / "resume.safetensors").is_file():
            console.print(f"stopped; to continue, use the same command with --resume ({out})")
        raise
    if result is None:
        console.print(f"{out} is finished: nothing to resume")
    return result
