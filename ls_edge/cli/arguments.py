"""Checks of a command's arguments that need no heavy package, made before torch takes its ten seconds to load.

What they find is also found later, where it is used; the messages are the same.
"""

from __future__ import annotations

from pathlib import Path

from ls_edge.errors import DataError, RunError, UsageError

_CONFIG, _WEIGHTS = "config.yaml", "model.safetensors"


def check_data(source: str) -> None:
    """Raise :class:`DataError` where ``source`` names neither data that this package has, nor a path that is there."""
    from ls_edge.data.datasets import is_timm_name

    if source != "digits" and not is_timm_name(source) and not Path(source).exists():
        raise DataError(f"{source}: no such folder or tar; check the path, or write 'digits' for the embedded images")


def check_run(folder: Path) -> None:
    """Raise :class:`RunError` where ``folder`` is no finished run."""
    if (folder / "manifest.json").is_file() and not (folder / _CONFIG).is_file():
        raise RunError(f"{folder} is a bundle, no run; give the folder that 'ls-edge train' wrote")
    if folder.is_file():
        raise RunError(f"{folder} is a file; give the folder of a run, which holds {_CONFIG}")
    if not (folder / _CONFIG).is_file():
        raise RunError(
            f"{folder} is no run: it has no {_CONFIG}; make one with 'ls-edge train --data DATA --out {folder}'"
        )
    if not (folder / _WEIGHTS).is_file():
        raise RunError(f"{folder / _WEIGHTS} is missing; copy it from where the run was made, or train again")


def check_training(out: Path, init: str | None, *, pretrained: bool, resume: bool, overwrite: bool) -> None:
    """Raise an error where a training cannot write its run to ``out`` or has nothing to start from."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file; name a folder")
    if resume:
        if not (out / _CONFIG).is_file():
            raise RunError(f"{out} is no run, so there is nothing to resume; leave --resume out, or check --out")
        return
    if not overwrite and ((out / _CONFIG).exists() or (out / _WEIGHTS).exists()):
        raise RunError(f"{out} holds a run already; go on with --resume, replace it with --overwrite, or name another")
    if init is None:
        return
    if pretrained:
        raise UsageError("--init and --pretrained exclude each other; leave one out")
    if not Path(init).exists():
        raise RunError(f"{init} is neither a run folder nor a file; check --init")
    if Path(init).is_dir() and not (Path(init) / _CONFIG).is_file():
        raise RunError(f"{init} is no run: it has no {_CONFIG}; give a run folder or a checkpoint file")
