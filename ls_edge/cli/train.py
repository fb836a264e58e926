"""``ls-edge train``: from images to a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from ls_edge.cli import Command
from ls_edge.errors import UsageError
from ls_edge.training.methods import METHODS

if TYPE_CHECKING:
    from ls_edge.training.config import TrainConfig


@click.command(cls=Command, short_help="Fine-tune a vision transformer with its block order shuffled.")
@click.option(
    "--data", metavar="DATA",
    help="Folder of class folders, a tar of one, 'digits', or a torch/ or hfds/ name of timm's factory.",
)  # fmt: skip
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="RUN", help="Folder to write.")
@click.option("--model", metavar="NAME", help="timm's name, vit_digits or vit_cifar.  [default: vit_digits]")
@click.option("--depth", type=click.IntRange(1), metavar="K", help="Keep K of the blocks, evenly spaced.")
@click.option("--method", type=click.Choice(list(METHODS)), help="What is done to the order.  [default: shuffle]")
@click.option("--init", metavar="RUN_OR_FILE", help="Start from a run, or a .safetensors or .pth file.")
@click.option("--pretrained", is_flag=True, default=None, help="Start from timm's pretrained weights.")
@click.option("--img-size", type=click.IntRange(1), metavar="N", help="Side of the images.  [default: the model's]")
@click.option("--epochs", type=click.IntRange(0), metavar="N", help="0 writes the model as it starts.  [default: 20]")
@click.option("--batch-size", type=click.IntRange(1), metavar="N", help="Images a step.  [default: 64]")
@click.option("--lr", type=float, metavar="X", help="Highest learning rate.  [default: the model's]")
@click.option("--weight-decay", type=float, metavar="X", help="Of matrices.  [default: 0.05]")
@click.option(
    "--augment", type=click.Choice(["auto", "none", "shift", "crop", "timm"]),
    help="shift: moved a little; crop: moved and mirrored; timm: resized crops, RandAugment.  [default: auto]",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(0), metavar="N", help="Of weights, orders, batches.  [default: 0]")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="Where to train.  [default: auto]")
@click.option("--workers", type=click.IntRange(0), metavar="N", help="Processes that decode images.  [default: 0]")
@click.option("--threads", type=click.IntRange(1), metavar="N", help="Torch's threads on the CPU.")
@click.option("--config", type=click.Path(path_type=Path), metavar="FILE", help="YAML; flags win over it.")
@click.option("--resume", is_flag=True, help="Go on with the run in RUN, with its own settings.")
@click.option("--overwrite", is_flag=True, help="Replace the run in RUN.")
@click.option("--json", "as_json", is_flag=True, help="Print a summary as JSON.")
def command(out: Path, config: Path | None, resume: bool, overwrite: bool, as_json: bool, **flags: Any) -> None:
    """Train a model on DATA and write it to the folder RUN: model.safetensors, config.yaml, metrics.jsonl.

    The checkpoint with the lowest cross-entropy on a seeded tenth of DATA is kept. A run that was stopped goes on
    with --resume, to the same result.
    """
    try:
        from ls_edge.training.loop import train
    except ImportError as error:
        raise UsageError(f"training needs {error.name}; install it with pip install 'ls-edge[train]'") from None
    from rich.console import Console

    from ls_edge.training.config import read_config
    from ls_edge.training.progress import Bars
    from ls_edge.training.resume import RESUME

    console = Console(stderr=True)
    settings, named = read_config(config, flags)
    if resume:
        if overwrite:
            raise UsageError("--resume and --overwrite exclude each other; leave one out")
        settings = _settings_of(out, settings, named)
        if not (out / RESUME).is_file():
            console.print(f"{out} is finished: nothing to resume", soft_wrap=True)
            return
    elif not settings.data.source:
        raise UsageError("no data: say --data DATA, or name data.source in the --config file")
    try:
        with Bars(console) as listener:
            summary = train(
                settings, out, listener=listener, resume=resume, overwrite=overwrite,
                model_named="model.name" in named,
            )  # fmt: skip
    except KeyboardInterrupt:
        if (out / RESUME).is_file():
            console.print(f"stopped; go on with 'ls-edge train --out {out} --resume'", soft_wrap=True)
        raise
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(summary), indent=1).decode())
    else:
        _print(summary)


def _settings_of(out: Path, asked: TrainConfig, named: frozenset[str]) -> TrainConfig:
    """The run's own settings; raises :class:`UsageError` where a flag asks for others."""
    from ls_edge.training.checkpoint import read_record
    from ls_edge.training.config import TrainConfig

    file, _ = read_record(out)
    own = TrainConfig(**{name: getattr(file, name) for name in TrainConfig.__struct_fields__})
    for name in sorted(named - {"data.workers"}):
        value, was = asked, own
        for step in name.split("."):
            value, was = getattr(value, step), getattr(was, step)
        if value != was:
            raise UsageError(
                f"--resume goes on with the settings of {out}, where {name} is {was!r}, not {value!r}; leave it out, "
                "or start anew in another folder with --init"
            )
    return own


def _print(summary: Any) -> None:
    from rich.console import Console

    s = summary
    if s.best_epoch is None:
        what = "as it starts, not trained"
    else:
        what = f"epoch {s.best_epoch} of {s.epochs}, validation cross-entropy {s.val_loss:.4f}"
    text = (
        f"[bold]{s.run}[/bold]: {s.model}, {s.blocks} blocks, {s.parameters / 1e6:.2f} million parameters, {s.method}: "
        f"{what}; {s.images} images, {s.device}, {s.precision}, {s.seconds:.0f} s"
    )
    Console(soft_wrap=True, highlight=False).print(text)
