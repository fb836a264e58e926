"""``ls-edge export``: from a run to a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ls_edge import export
from ls_edge.cli import options
from ls_edge.cli.command import Command
from ls_edge.cli.output import note_account, print_json, warn
from ls_edge.data.datasets import open_data
from ls_edge.export.settings import ExportSettings
from ls_edge.report.progress import StepProgress
from ls_edge.report.terminal import open_console


@click.command(
    cls=Command,
    examples=(
        "ls-edge export run --out bundle --per-block",
        "ls-edge export run --out bundle --precision int8 --calibrate photos",
        "ls-edge export run --out bundle --precision fp16 --engine tensorrt",
    ),
)
@click.argument("run", type=options.FILE)
@options.output_folder("Folder to write.", required=True, type=options.FILE, metavar="BUNDLE")
@click.option("--per-block", is_flag=True, expose_value=False, help="One ONNX file per block (the default).")
@options.text("--calibrate", "Images to calibrate int8 and to verify the parts.", "DATA")
@options.settings(ExportSettings)
@options.JSON
def command(
    run: Path,
    out: Path,
    calibrate: str | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Split a trained model into one ONNX file per block.

    Splits the model of the folder RUN into stem, blocks, and head, verifies them against PyTorch, and writes a bundle.
    An existing bundle is replaced only after the new one is verified.

    fp16 is faster on GPUs and int8 on CPUs with VNNI or AMX; the output says which is fast on this machine.
    """
    asked = ExportSettings.of(settings)
    images = None if calibrate is None else open_data(calibrate, "eval")
    with StepProgress("export") as progress:
        exported = export(
            run,
            out,
            calibrate=images,
            **settings,
            on_progress=progress,
            on_warning=warn,
        )
    if exported.account is not None:
        note_account(exported.account)
    if asked.engine == "tensorrt" and exported.engines_built is None:
        click.echo("no TensorRT with a GPU here; the devices build their engines from these files", err=True)
    if as_json:
        print_json(exported.document())
    else:
        exported.show(open_console())
